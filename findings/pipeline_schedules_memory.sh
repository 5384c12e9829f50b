#!/bin/sh
# Zero bubble holds fewer activations on the first rank than interleaved 1F1B, 8 to 11 stages, but more on the last.
#
# Topic: Training memory
# Package: torch 2.13.0
# Expected: Zero bubble as much as interleaved 1F1B or more, as weights' gradients are computed later.
# Seen: With 4 ranks of 2 stages, interleaved 1F1B holds up to 11 forward passes on the first rank and 5 on the last.
#   Interleaved zero bubble holds 8 on each: it starts backward passes earlier, and keeps a forward pass until the
#   gradients of its weights are computed.
# Hurts: Who gives first and last stages fewer layers by a rule of 1F1B, or avoids zero bubble for its memory.
# Date: 2026-11-29
# Output:
#     torch 2.13.0
#     Interleaved1F1B: [11, 9, 7, 5] forward passes on ranks 0 to 3
#     InterleavedZeroBubble: [8, 8, 8, 8] forward passes on ranks 0 to 3
#     ZBVZeroBubble: [8, 8, 8, 8] forward passes on ranks 0 to 3
#     DualPipeV: [9, 9, 9, 9] forward passes on ranks 0 to 3
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/look.py" << 'END'
def look() -> None:
    """Print how many forward passes of a stage each rank holds at most."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks, microbatches = 4, 16
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    print("torch", torch.__version__.split("+")[0])
    most = {}
    for name, places in (
        ("Interleaved1F1B", (0, 4)),
        ("InterleavedZeroBubble", (0, 4)),
        ("ZBVZeroBubble", (0, 7)),
        ("DualPipeV", (0, 7)),
    ):
        stages = [PipelineStage(torch.nn.Linear(1, 1), i, 2 * ranks, torch.device("cpu")) for i in places]
        schedule = getattr(schedules, f"Schedule{name}")(stages, microbatches, loss_fn=torch.nn.functional.mse_loss)
        most[name] = []
        for order in schedule.pipeline_order.values():
            held = [0]
            for action in filter(None, order):
                for part in action.sub_actions or [action]:
                    ends = part.computation_type.name in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
                    held.append(held[-1] + (part.computation_type.name == "FORWARD") - ends)
            most[name].append(max(held))
        print(f"{name}: {most[name]} forward passes on ranks 0 to 3")
    assert most["Interleaved1F1B"][0] > most["InterleavedZeroBubble"][0]
    assert most["Interleaved1F1B"][3] < most["InterleavedZeroBubble"][3]


if __name__ == "__main__":
    look()
END
HOME="$folder" TMPDIR="$folder" "$folder/bin/python" "$folder/look.py" > "$folder/seen"
cat "$folder/seen"
sed -n '/^# Output:/,/^[^#]/ s/^#     //p' "$0" | diff - "$folder/seen" || { echo 'the output changed' >&2; exit 1; }
