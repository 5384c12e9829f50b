"""What a search found: counts, gains, interference and noise.

Readings that cannot be make their trial failed, and the reason names the value and the rule.

What is not handed on: secrets in text, in plain data and in the words of a command line."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from flagcore.domain.chip import CORES, OTHERS_CORES
from flagcore.domain.launch import Exit, failure
from flagcore.domain.plan import Counts, Plan, Runs, Speedup
from flagcore.domain.secrets import (
    is_secret,
    redact_arguments,
    redact_data,
    redact_text,
    secrets_in_arguments,
    secrets_in_data,
)
from flagcore.domain.trial import PROBE, Role, Shortened, Trial, TrialState, checked
from flagcore.tuner.search_state import interference, speedup
from flagcore.tuner.stages.learn import learn
from tests import tasks
from tests.checks import given
from tests.tasks import task
from tests.tuner.test_search_state import trial

FIRST = (trial(0, "baseline", 100.0, Role.BASELINE), trial(1, "best", 150.0, Role.SEARCH))
REPEATS = (trial(2, "baseline", 100.0, Role.REPEAT), trial(3, "best", 130.0, Role.REPEAT))


def found(*trials: Trial) -> tuple[float | None, tuple[float, ...]]:
    """The speedup of the best over the baseline, and that of each round."""
    known = speedup(learn(trials), "")
    return (known.value, known.rounds) if known else (None, ())


def test_the_speedup_is_that_of_the_medians_and_each_round_of_both_gives_another() -> None:
    assert found(*FIRST) == (0.5, (0.5,))
    ratio = 1 / 100 / (0.5 / 150 + 0.5 / 130) - 1
    assert found(*FIRST, *REPEATS) == (pytest.approx(ratio), (0.5, pytest.approx(0.3)))


@pytest.mark.parametrize(
    ("first", "repeats", "expected"),
    [
        (FIRST, [(2, "baseline", 100.0), (4, "baseline", 80.0), (5, "best", 120.0)], (0.5, 0.5)),
        ((replace(FIRST[0], state=TrialState.OUT_OF_MEMORY, measurement=None), FIRST[1]), [], ()),
        ((), [], ()),
        ((trial(0, "baseline", 200.0, Role.BASELINE), FIRST[1]), [], (0.0,)),
        ((trial(2, "baseline", 100.0, Role.BASELINE), FIRST[1]), [], (0.5,)),
    ],
    ids=["late rival", "baseline failed", "no trials", "baseline is best", "baseline ran last"],
)
def test_gains_are_those_over_the_last_measured_baseline(
    first: tuple[Trial, ...], repeats: list[tuple[int, str, float]], expected: tuple[float, ...]
) -> None:
    assert found(*first, *(trial(*each, Role.REPEAT) for each in repeats))[1] == pytest.approx(expected)


def test_an_incomplete_round_does_not_count() -> None:
    failed = replace(REPEATS[0], state=TrialState.FAILED, measurement=None)
    incomplete_round = (trial(4, "baseline", 110.0, Role.REPEAT), trial(5, "best", 121.0, Role.REPEAT))
    assert found(*FIRST, failed, REPEATS[1], *incomplete_round)[1] == (0.5, pytest.approx(0.1))


def test_only_the_runs_with_the_least_flaw_count_and_the_others_have_a_reason() -> None:
    measured = replace(given(FIRST[0].measurement), telemetry={CORES: 2.0, OTHERS_CORES: 1.2})
    disturbed = replace(FIRST[0], measurement=measured)
    failed = replace(REPEATS[0], state=TrialState.FAILED, measurement=None)
    beside = replace(trial(4, "baseline", 90.0, Role.REPEAT), group=0)
    quiet = trial(5, "baseline", 80.0, Role.REPEAT)
    runs = Runs.of((disturbed, failed, beside, quiet))
    assert (runs.counted, runs.median_s) == ((quiet,), pytest.approx(1 / 80))
    assert runs.left_out.keys() == {0, 2, 4}
    assert (runs.left_out[0], runs.left_out[2]) == ("other programs used its cores", "failed")
    assert Runs.of((disturbed, failed)).counted == (disturbed,)
    assert Runs.of((disturbed, beside)).counted == (disturbed,)  # it ran alone and whole


@pytest.mark.parametrize(
    ("rounds", "conclusive", "significant"),
    [((0.2,), True, True), ((0.15, 0.25), True, True), ((0.05, 0.3), False, False), ((0.2, -0.01), False, False)],
)
def test_rounds_that_differ_by_more_than_the_speedup_are_not_conclusive(
    rounds: tuple[float, ...], conclusive: bool, significant: bool
) -> None:
    known = Speedup.of(0.2, rounds)
    assert (known.conclusive, known.significant) == (conclusive, significant)
    assert (known.low, known.high) == (min(0.2, *rounds), max(0.2, *rounds))
    assert not Speedup.of(0.2, rounds, is_significant=False).significant


def reported(predicted: float | None, believed: float | None, measured: float = 1.0) -> Trial:
    trial_ = trial(0, "x", 1.0 / measured, Role.SEARCH)
    assert trial_.measurement is not None
    return replace(
        trial_,
        predicted=tasks.prediction(compute_s=predicted) if predicted else None,
        believed=tasks.belief(believed) if believed else None,
        measurement=replace(trial_.measurement, step_time_s=measured),
    )


def test_a_measured_time_takes_precedence_over_predictions() -> None:
    one = reported(predicted=0.5, believed=0.8)
    assert (one.measured_over(one.predicted), one.measured_over(one.believed)) == (2.0, 1.25)
    assert one.measured_over(None) is None
    assert replace(one, measurement=None).measured_over(one.predicted) is None


NO_RULES: dict[str, object] = {"illegal": {}, "pruned": {}}
PLAN = Plan(
    chip="x",
    devices=1,
    objective="step_time_s",
    counts=Counts(**dict.fromkeys(Counts.__slots__, 0) | NO_RULES),
    trials=(),
    repeats=(),
    baseline=None,
    best=None,
    speedup=None,
    stopped_because="",
)


def test_a_plan_without_a_speedup_has_no_gain() -> None:
    assert replace(PLAN, speedup=Speedup.of(0.3, (0.5, 0.2))).gain == 0.3
    assert PLAN.gain is None


def test_predictions_before_and_after_are_compared_over_the_same_trials() -> None:
    plan = replace(PLAN, trials=(reported(4.0, None), reported(0.5, 1.25), reported(2.0, 0.8), reported(None, 0.1)))
    assert (plan.prediction_error.before, plan.prediction_error.after) == (pytest.approx(1.0), pytest.approx(0.25))
    assert plan.prediction_error.trials == 2
    assert replace(plan, trials=(reported(4.0, None),)).prediction_error is None


SINGLE = trial(0, "base", 100.0, Role.BASELINE)


def parallel_trial(
    number: int, speed: float, role: Role = Role.INTERFERENCE, who: str = "base", spread: float = 0.0
) -> Trial:
    return replace(trial(number, who, speed, role, spread), group=0)


@pytest.mark.parametrize(
    ("speed", "spread", "quiet"),
    [
        (100.0, 0.0, True),
        (99.0, 0.0, True),
        (120.0, 0.0, True),
        (96.0, 0.0, False),
        (96.0, 0.1, True),
        (80.0, 0.9, False),
    ],
)
def test_a_slowdown_must_be_within_the_noise_and_small(speed: float, spread: float, quiet: bool) -> None:
    found = interference([trial(0, "base", 100.0, Role.BASELINE, spread), parallel_trial(1, speed)])
    assert found.slowdown == pytest.approx(100.0 / speed - 1.0)
    assert found.is_negligible is quiet


def test_a_run_that_fails_while_others_run_counts_as_interference() -> None:
    failed = replace(parallel_trial(1, 100.0), state=TrialState.OUT_OF_MEMORY, measurement=None)
    assert not interference([SINGLE, failed]).is_negligible


def test_it_is_unknown_without_both_runs() -> None:
    interrupted = replace(parallel_trial(1, 100.0), state=TrialState.INTERRUPTED, measurement=None)
    probe = replace(SINGLE, fidelity=PROBE)
    for known in ([SINGLE], [SINGLE, interrupted], [parallel_trial(1, 100.0)], [probe, parallel_trial(1, 100.0)]):
        assert interference(known) is None


def test_disturbed_trials_are_ignored() -> None:
    disturbed = [SINGLE, parallel_trial(1, 50.0), parallel_trial(2, 150.0, Role.SEARCH, "a")]
    known = learn(disturbed)
    assert known.best == SINGLE
    assert disturbed[2].candidate not in known.settled
    assert learn([*disturbed, trial(3, "a", 130.0)]).best.number == 3
    assert learn([SINGLE, parallel_trial(1, 99.0), parallel_trial(2, 150.0, Role.SEARCH, "a")]).best.number == 2


DONE = tasks.trial(
    1, tasks.candidate(), 0.5, duration_s=4.0, predicted=tasks.prediction(capacity=float(1 << 30), compute_s=1.0)
)


def with_figures(trial: Trial = DONE, **changes: Any) -> Trial:
    assert trial.measurement is not None
    steps = changes.get("step_times_s")
    changes = {"step_time_s": steps[0]} | changes if steps else changes
    return replace(trial, measurement=replace(trial.measurement, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_times_s": (0.0,)}, "step time: 0 s is not between 1e-09 and 1e+06 s"),
        ({"step_times_s": (1.0, -2.0)}, "step time: -2 s"),
        ({"step_times_s": (math.nan,)}, "step time: nan s"),
        ({"step_times_s": (math.inf,)}, "step time: inf s"),
        ({"step_times_s": (1e-300,)}, "step time: 1e-300 s"),
        ({"step_times_s": (1e305,) * 3}, "step time: 1e+305 s"),
        ({"step_time_s": 5e-324}, "step time: 4.941e-324 s"),
        ({"scaled_from": 0.0, "low_s": 0.0}, None),
        ({"scaled_from": math.inf}, "step time: inf s"),
        ({"step_times_s": (2.0, 2.0, 2.0)}, "step time: 3 steps take 6 s, but the trial took 4 s; check the unit"),
        ({"step_times_s": (2.0, 2.0)}, None),
        ({"step_times_s": (8.0, 8.0), "scaled_from": 2.0}, None),
        ({"step_times_s": (8.0, 8.0), "scaled_from": 4.0}, "step time: 2 steps take 8 s"),
        ({"step_times_s": (900.0,), "points": ({"concurrency": 1.0},)}, None),
        ({"tokens_per_second_per_device": 0.0}, "throughput: 0 tokens/s"),
        ({"tokens_per_second_per_device": math.inf}, "throughput: inf tokens/s"),
        ({"peak_allocated_bytes": 9 << 30}, None),
        ({"peak_allocated_bytes": 11 << 30}, "memory: peak_allocated_bytes: 11 GiB is not between 0 and 10 GiB"),
        ({"peak_reserved_bytes": -1}, "memory: peak_reserved_bytes"),
        ({"device_used_bytes": 10**300}, "memory: device_used_bytes"),
        ({"spread_s": math.nan}, "figure: spread_s is nan"),
        ({"figures": {"ttft_s.p99": math.inf}}, "figure: ttft_s.p99 is inf"),
        ({"telemetry": {"power_watts": math.nan}}, "figure: power_watts is nan"),
        ({"losses": (None, 1.0)}, None),
    ],
)
def test_a_reading_that_cannot_be_fails_its_trial(changes: dict[str, Any], words: str | None) -> None:
    trial = with_figures(**changes)
    found = checked(trial)
    if words is None:
        assert found == trial
    else:
        assert (found.state, found.measurement) == (TrialState.FAILED, None)
        assert f"unusable {words}" in (found.reason or "")


def test_only_a_run_of_flagcore_is_compared_with_its_duration() -> None:
    long = with_figures(step_times_s=(60.0,))
    assert checked(long).state is TrialState.FAILED
    for changes in ({"source": "history.csv"}, {"fidelity": PROBE}, {"duration_s": 0.0}):
        assert checked(replace(long, **changes)).state is TrialState.MEASURED


def test_a_failed_trial_keeps_its_reason_and_the_steps_that_can_be() -> None:
    shortened = Shortened(global_batch_size=2, whole=8, scale=2.0, low=1.0, high=3.0)
    steps = {"finished_steps_s": (math.inf, 1.0, 0.0, -1.0, 1e305, 8.0, 20.0), "shortened": shortened}
    failed = with_figures(replace(DONE, state=TrialState.INVALID, reason="why", **steps), step_times_s=(0.0,))
    found = checked(failed)
    assert (found.state, found.reason, found.measurement) == (TrialState.INVALID, "why", None)
    assert found.finished_steps_s == (1.0, 8.0)


HIDDEN = "s3cr3tv4lu3"


SECRET_NAMES = (
    *("HF_TOKEN", "hf_token", "HUGGING_FACE_HUB_TOKEN", "--hf-token", "token", "OPENAI_API_KEY", "--api-key", "apiKey"),
    *("apikey", "AWS_SECRET_ACCESS_KEY", "password", "db.password", "PGPASSWORD", "client_secret", "MY_SECRET"),
    *("ADMIN_KEY", "GATEWAY_API_KEYS", "private_key", "ssl.private-key", "Authorization", "DB_PASSWD", "--wandb-key"),
    *("DB_PW", "DB_PASS", "smtp_pass", "PAT", "GITHUB_PAT", "pgPwd", "creds", "s3-key", "SLACK_WEBHOOK_URL"),
    *("MODELARTS_SK", "--ak", "SSHPASS", "auth", "HF_TOKEN_2", "API_KEY_PROD", "TENCENTCLOUD_SECRET_ID", "Cookie"),
    *("SECRET_KEY_BASE", "Pwd", "DBPASS", "APITOKEN", "SMTPPASS", "WANDBKEY", "GHPAT", "client_key_data", "HF_TOKEN2"),
    *("BAIDU_BOS_SK", "--honeycomb-writekey", "COS_SECRETID"),
    *("--dbpass", "OpenAIKey", "refreshtoken", "数据库密码", "访问密钥"),
)
OTHER_NAMES = (
    *("max_num_batched_tokens", "output_tokens", "bos_token", "eos-token", "time_per_token", "next_token", "PATH"),
    *("forward_pass", "FORWARD_PASS", "pass", "PASS", "pat", "OLDPWD", "sort_key", "base_url", "per_pass"),
    *("public_key", "GPG_KEY", "key_value", "SECRET_NAME", "PASSWORD_FILE", "secretKeyRef", "task", "mask", "SAS"),
    *("num_key_value_heads", "key", "keys", "PWD", "kv_cache_type", "tokenizer", "secretary", "monkey", "api", ""),
    *("keyboard", "hotkey", "compass", "bypass", "subtoken", "passes", "token_budget", "existingSecret", "image_token"),
    *("cachekey", "max_tokens2", "sha256", "top_k", "think_end_token", "input-key", "FUSION_PASS"),
)


@pytest.mark.parametrize("name", SECRET_NAMES + OTHER_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name) == (name in SECRET_NAMES)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"export HF_TOKEN={HIDDEN}", "export HF_TOKEN=(left out)"),
        (f"  password: {HIDDEN} with spaces", "  password: (left out)"),
        (f"Namespace(api_key='{HIDDEN}', port=80)", "Namespace(api_key='(left out)', port=80)"),
        (f"args: {{'api_key': ['{HIDDEN}']}}", None),
        (f'{{"host": "a", "api_key": "{HIDDEN}", "port": 80}}', '{"host": "a", "api_key": "(left out)", "port": 80}'),
        (f"vllm serve x --api-key {HIDDEN} --port 80", "vllm serve x --api-key (left out) --port 80"),
        (f"vllm serve x --api-key={HIDDEN} --port 80", "vllm serve x --api-key=(left out) --port 80"),
        (f"['vllm', '--api-key', '{HIDDEN}', '--port', '80']", "['vllm', '--api-key', '(left out)', '--port', '80']"),
        (f"postgres://me:{HIDDEN}@db:5432/x", "postgres://me:(left out)@db:5432/x"),
        (f"Authorization: Bearer {HIDDEN}", "Authorization: (left out)"),
        (f"curl -H 'Authorization: Bearer {HIDDEN}' http://x", "curl -H 'Authorization: (left out)' http://x"),
        (f"x: {{Authorization: Basic {HIDDEN}, port: 1}}", "x: {Authorization: (left out), port: 1}"),
        (f"password: {HIDDEN} hf_abcdefghijABCDEFGHIJ12", "password: (left out)"),
        (f"https://{HIDDEN}{HIDDEN}@example.com/x.git", "https://(left out)@example.com/x.git"),
        (f"GET /x?a=1&X-Amz-Signature={HIDDEN}&b=2", "GET /x?a=1&X-Amz-Signature=(left out)&b=2"),
        (f"-----BEGIN RSA PRIVATE KEY-----\n{HIDDEN}\n-----END", "(left out)-----END"),
        (f"sent 'bearer {HIDDEN}'", "sent 'bearer (left out)'"),
        (f"postgres://h/x?user=u&password={HIDDEN}&b=2", "postgres://h/x?user=u&password=(left out)&b=2"),
        (f"mysql://root:p@{HIDDEN}@h/x", "mysql://root:(left out)@h/x"),
        (f'{{\\"api_key\\": \\"{HIDDEN}\\"}}', '{\\"api_key\\": \\"(left out)\\"}'),
        (f"os.environ['HF_TOKEN'] = b'{HIDDEN}'", "os.environ['HF_TOKEN'] = b'(left out)'"),
        (f'--headers \'{{"X-Api-Key": "{HIDDEN}"}}\' --x', '--headers \'{"X-Api-Key": "(left out)"}\' --x'),
        (f"api_keys:\n  - {HIDDEN}\nport: 1", "api_keys:\n  - (left out)\nport: 1"),
        (f"curl -u me:{HIDDEN} http://x", "curl -u me:(left out) http://x"),
        (f"machine h login me password {HIDDEN}", "machine h login me password (left out)"),
        (
            f"https://open.feishu.cn/open-apis/bot/v2/hook/{HIDDEN}",
            "https://open.feishu.cn/open-apis/bot/v2/hook/(left out)",
        ),
        (f"truncated: {{'password': '{HIDDEN}", "truncated: {'password': '(left out)"),
        ("Basic settings, a bearer instrument", "Basic settings, a bearer instrument"),
        ("/models/sk-llama-3-8b-instruct-awq", "/models/sk-llama-3-8b-instruct-awq"),
        ("secret:\n  name: hf\n", "secret:\n  name: hf\n"),
        (': "${HF_TOKEN:?set it}"; x --token $HF_TOKEN', ': "${HF_TOKEN:?set it}"; x --token $HF_TOKEN'),
        ("pulled with hf_abcdefghijABCDEFGHIJ12", "pulled with (left out)"),
        ("max_tokens=512, eos_token='</s>'", "max_tokens=512, eos_token='</s>'"),
        ("print_info: BOS token = 1 '<s>'", "print_info: BOS token = 1 '<s>'"),
        ("api_key=None, token: null", "api_key=None, token: null"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("--api-key --port 80", "--api-key --port 80"),
    ],
)
def test_secrets_in_text(text: str, shown: str | None) -> None:
    found = redact_text(text)
    assert HIDDEN not in found
    assert shown in (None, found)
    assert redact_text(found) == found


IN_COMMANDS = r"""
docker login -u me -p § registry.io || docker login registry.io -p§ || podman login --username x -p § r.io
sshpass -p § ssh -p 22 me@h || sshpass -p§ scp f me@h: || ssh me@h "mysql -uroot -p§ -e x" || sh -c 'redis-cli -a § x'
wandb login § || wandb login --relogin --host https://wandb.io § || vault login § || ngrok config add-authtoken §
mysql -uroot -p§ db || /usr/bin/mysqldump -h h -u root -p§ db || redis-cli -h h -a § ping || r --requirepass §
curl -b sid=§ http://h || curl --cookie "sid=§" http://h || curl -s -u me:§ http://h || wget --password=§ http://h
openssl rsa -in k.pem -passin pass:§ || openssl enc -aes-256-cbc -k § -in f || openssl pkcs12 -export -passout pass:§
app --dbpass § || app --dbpass=§ || tailscale up --authkey § || keytool -storepass § || ray start --redis-password=§
curl 'https://h/x?key=§' || curl "https://h/x?a=1&key=§&b=2" || pip install --index-url https://u:§@h/simple x
zip -P § a.zip f || unzip -P§ a.zip || 7z x -p§ a.7z || ldapsearch -x -D cn=a -w § || smbclient //h/s -U me%§
mc alias set m http://h:9000 AK § || ossutil config -e h -k § || kubectl create secret generic x --from-literal=pw=§
aws configure set aws_secret_access_key § || git config --global user.token § || etcdctl put /app/password §
cypher-shell -u neo4j -p § || mcli alias set m http://h:9000 AK § || neo4j-admin dbms set-initial-password §
borg create --passcommand "echo §" || curl -H "X-Api-Key: §" http://h || ROBOFLOWKEY=§ python a.py
npm config set //registry.npmjs.org/:_authToken § || rabbitmqctl add_user me § || htpasswd -b f me § || sqlplus me/§@db
influx write -t § x || mount.cifs //h/s /m -o user=u,pass=§ || redis-cli --pass § ping || apptainer remote login -p § o
docker run -e APITOKEN=§ image || sbatch --export=ALL,HFTOKEN=§ x.sh || twine upload -u u -p § f || lftp -u me,§ h
"""
IN_TEXTS = r"""
docker login \↵  -p § r.io || ['mysql', '-p§', 'db'] || - name: DB_PASSWORD↵  value: §
env: [{name: APITOKEN, value: §}] || {"name": "WANDB_KEY", "value": "§"} || machine h.io↵login me↵password §
-----BEGIN PGP PRIVATE KEY BLOCK-----↵↵lQ§↵-----END || u:§@tcp(127.0.0.1:3306)/db || 密码：§ || 令牌是§ || 密码为“§”
- value: §↵  name: HF_TOKEN || .dockerconfigjson: § || <entry key="password">§</entry> || requirepass § || PASSWORD "§"
smtp.login("me", "§") || sshfs -o password_stdin h:/ /m <<< § || https://h/t/§/conda || curl -u :§ h || 'h:1234:*:me:§'
echo § | docker login --password-stdin || echo "§" | sudo -S true || gh auth login --with-token <<< § || echo §|chpasswd
"""
ORDINARY = r"""
torchrun --nproc_per_node 8 --master_port 29500 pretrain_gpt.py --tokenizer-type NullTokenizer --tokenizer-model /m
vllm serve Qwen/Qwen3-8B --max-num-batched-tokens 8192 --tokenizer Qwen/Qwen3-8B --tokenizer-mode auto --api-key EMPTY
vllm serve m --kv-cache-dtype fp8 --tool-call-parser hermes --ssl-keyfile /ssl/server.key --served-model-name key_value
python -m sglang.launch_server --model-path m --max-total-tokens 100000 --tokenizer-path m --token-budget 4096
python train.py --bos-token '<s>' --pad-token '[PAD]' --image_token '<image>' --think_end_token '</think>' --passes 2
python -m verl.trainer.main_ppo data.prompt_key=prompt data.image_key=images algorithm.adv_estimator=grpo
python eval.py --pass-at-k 1 --metrics pass@1 pass@10 --input-key prompt --label-key answer --first_token_latency 1
python run.py --virtual-token 5 --latent_token 8 --moe-token-dispatcher-type alltoall --num-speculative-tokens 3
lm_eval --model hf --tasks humaneval --metric pass@1 || deepspeed train.py --tokens_per_batch 4096 --key_value 8
llama-server -m m.gguf -c 8192 -p 512 --port 8080 -b 2048 || llama-bench -m m.gguf -p 512 -n 128 -b a=b -u me:me
srun --account=abc --partition=gpu bash run.sh || sbatch -p gpu -A me --export=ALL,OMP_NUM_THREADS=8 x
docker run -p 8000:8000 -u 1000:1000 -v /data:/data img:tag || docker run --user nobody:nogroup -p 80:80 nginx
docker build -t a/b:1 --build-arg CUDA=12.4 . || docker login registry.io || docker compose -p project up -d
kubectl get secret my-secret -n ns -o yaml || kubectl create configmap sizes --from-literal=tp=8 --from-literal=b=16
kubectl create secret generic hf --from-file=token=/run/secrets/token || kubectl delete secret db-secret other
pip install torch --index-url https://download.pytorch.org/whl/cu124 || pip install tokenizers pytest-pass keyboard
ssh -p 2222 -i ~/.ssh/id_rsa me@host nvidia-smi || scp -P 2222 -r me@host:/data . || sshpass -e ssh -p 22 host uptime
rsync --password-file=/etc/rsync.pw src/ host::mod || git clone https://github.com/NVIDIA/Megatron-LM.git -b core_r0.12
git config --global user.name me || git config --global credential.helper store || git checkout -b feature/token-router
curl http://h/v1/completions -d '{"prompt": "hi", "max_tokens": 7, "stop_token": 1}' || curl -b cookies.txt http://h
curl -H "Authorization: Bearer $HF_TOKEN" http://h || hf download m --token $HF_TOKEN || x --token "$(cat ~/token)"
mysql -u root -p db || mysql -h db -P 3306 -u root || redis-cli -h 10.0.0.1 -p 6379 ping || wandb login || wandb offline
export HF_TOKEN=${HF_TOKEN:-} || export TOKENIZERS_PARALLELISM=false || export PASS_RATE=0.5 TOKEN_BUDGET=4096 TOP_K=5
openssl req -x509 -newkey rsa:4096 -keyout key.pem -out cert.pem -nodes || openssl rsa -in k.pem -passin env:KEYPW
apt-get install -y git curl zip unzip openssl || zip -r out.zip dir || ssh-keygen -t rsa -N '' -f ~/.ssh/id_rsa
jupyter lab --port 8888 --ServerApp.token='' || aws configure set region us-east-1 || aws s3 cp s3://b/key/model.bin .
helm upgrade --install v chart --set image.tag=v0.9 --set secrets.existingSecret=hf || mindie --keyPath /k --auth none
srun -u me -p gpu x || docker run -u root -p 80:8000 i || grep HF_TOKEN file || export MONKEY=1 SORTKEY=name
redis-cli -a "$REDIS_PASS" ping || redis-server --requirepass "$PASS" || mount -o rw a /b || curl h/t/metrics/api
ray start --head --port=6379 || mpirun -np 16 -x NCCL_DEBUG=INFO python train.py || echo "pass 1" | tee x
"""


def lines(table: str) -> list[str]:
    return [each.replace("↵", "\n").strip(" ") for line in table.split("\n") for each in line.split(" || ") if each]


@pytest.mark.parametrize("text", lines(IN_COMMANDS + IN_TEXTS))
def test_a_secret_in_the_own_form_of_a_program_is_redacted(text: str) -> None:
    shown = redact_text(text.replace("§", HIDDEN))
    assert HIDDEN not in shown
    assert redact_text(shown) == shown
    if text in IN_COMMANDS:
        words = shlex.split(text.replace("§", HIDDEN))
        assert HIDDEN not in "".join(redact_arguments(words))
        assert HIDDEN in secrets_in_arguments(words)[-1]


@pytest.mark.parametrize("text", lines(ORDINARY))
def test_nothing_in_an_ordinary_command_is_redacted(text: str) -> None:
    assert redact_text(text) == text
    assert [*redact_arguments(shlex.split(text))] == shlex.split(text)


@pytest.mark.parametrize(
    "token",
    [
        *(
            "github_pat_11ABCDEFG0abcdefghijkl",
            "glpat-abcdefghijklmnop",
            "sk-ant-api03-abcdefghijklmnop",
            "gsk_" + 20 * "a",
        ),
        *("rpa_" + 40 * "A", "tgp_v1_" + 43 * "a", "dapi" + 32 * "a", "dop_v1_" + 64 * "b"),
        *("AKIAABCDEFGHIJKLMNOP", "LTAI5tabcdefghijkl", "AIza" + 35 * "b", "xoxb-1234567890-abc", "nvapi-" + 24 * "c"),
        *(
            "npm_" + 36 * "d",
            "pypi-" + 40 * "e",
            "dckr_pat_" + 24 * "f",
            "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl",
        ),
    ],
)
def test_tokens_of_known_formats_are_secrets_by_any_name(token: str) -> None:
    assert redact_text(f"read {token}\n") == "read (left out)\n"
    assert is_secret("SOME_VALUE", f"--x={token}")
    assert secrets_in_data({"SOME_VALUE": token}) == (token,)


@pytest.mark.costly
@pytest.mark.parametrize(
    "piece", ["\n", "password: ", "a\n", "-eyJ", "x = \n", "api_key=[", '"', "k='\\", "export ", "docker login -p "]
)
def test_long_texts_take_no_long_time(piece: str) -> None:
    # with a time that grows with the square of the length, this exceeds the test's time limit
    text = piece * ((1 << 18) // len(piece))
    assert isinstance(redact_text(f"token {text}"), str)


def test_a_known_secret_is_redacted_everywhere() -> None:
    known = secrets_in_data({"HF_TOKEN": HIDDEN, "PATH": "/usr/bin", "API_KEY": "x"})
    assert known == (HIDDEN,)
    assert redact_text(f"loading with <{HIDDEN}>", known) == "loading with <(left out)>"


@pytest.mark.parametrize("secret", ["s'p\"q\\r$ t/u", "one пароль", "first line\nlast line\n", " padded "])
def test_a_known_secret_is_redacted_however_it_is_written(secret: str) -> None:
    forms = (secret, repr(secret), repr([f'"{secret}']), json.dumps(secret), json.dumps(secret, ensure_ascii=False))
    shown = (*forms, shlex.quote(secret), quote(secret, safe=""), quote_plus(secret), *secret.split("\n"))
    for text in map(str.strip, shown):
        found = redact_text(f"<{text}>", [secret])
        assert not {*re.findall(r"\w+", text)} & {*re.findall(r"\w+", found.replace("(left out)", ""))} - {"n"}


def test_plain_data_round_trips() -> None:
    data: dict[str, Any] = {
        "envs": {"HF_TOKEN": HIDDEN, "A": "1"},
        "argv": ["serve", "--api-key", HIDDEN, "--tp", "2"],
        "storage": f"mysql://u:{HIDDEN}@h/d",
        "n": 3,
        "max_tokens": 5,
        "none": None,
        "points": [{"token": None}],
    }
    shown = redact_data(data)
    assert HIDDEN not in str(shown)
    assert shown["argv"] == ["serve", "--api-key", "(left out)", "--tp", "2"]
    assert {key: shown[key] for key in ("n", "max_tokens", "none", "points")} == {
        key: data[key] for key in ("n", "max_tokens", "none", "points")
    }
    assert set(secrets_in_data(data)) == {HIDDEN}


def test_secrets_of_a_command_line() -> None:
    words = ["p", "--token", HIDDEN, f"--wandb-api-key={HIDDEN}2", "-n", "-1", f"API_KEY={HIDDEN}", "http://a:bcdefg@h"]
    assert secrets_in_arguments(words) == [HIDDEN, HIDDEN + "2", "bcdefg"]
    assert HIDDEN not in " ".join(redact_arguments(words))
    assert secrets_in_arguments(["--max-tokens", "5", "--token", "--other"]) == []
    assert secrets_in_arguments(["--api-key", "one", "two", "--port", "80", "x"]) == ["one", "two"]


def test_the_reason_of_a_failure_has_no_secret_of_the_spec(tmp_path: Path) -> None:
    train = replace(task().spec.train, command=("train", "--api-key", HIDDEN))
    spec = replace(task().spec, envs={"MY_PASSWORD": "hunter-two"}, work=train)
    assert {HIDDEN, "hunter-two"} <= set(spec.secrets)
    (tmp_path / "stdout.log").write_text(f"cannot log in with hunter-two and {HIDDEN}\n")
    _state, reason = failure(Exit(code=1, ended_by=None, duration_s=1.0), str(tmp_path), (), spec.secrets)
    assert "cannot log in with (left out) and (left out)" in reason
