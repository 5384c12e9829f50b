# Sourced by bash, through BASH_ENV, before a user's script: runs what only computes, and records and skips the rest.
#
# A DEBUG trap sees each simple command before it runs. Assignments, builtins, functions and tools that only read run as
# written. All others are skipped with status 0; a file per command in FLAGCORE_TRACE has its kind, its directory, the
# number of its words, its expanded words, and the variables that it would have received, each ended by NUL.

__fc_tools=' arch awk basename bc cat comm cut date df dirname du egrep expr false fgrep find free gawk getconf getent grep head
 hostname id jq locale logname ls lscpu lspci mawk nproc nvidia-smi numfmt paste printenv pwd readlink realpath rev rocm-smi
 mx-smi ixsmi cnmon sed seq shuf sort ss stat tac tail test tr true uname uniq wc which whoami '
__fc_tools=${__fc_tools//$'\n'/ }
__fc_builtins=$(compgen -b)  # `type -t` would start a process for each command
__fc_builtins=" ${__fc_builtins//$'\n'/ } "
__fc_skipped_builtins=' bind caller compgen complete coproc enable fc hash history kill logout suspend trap ulimit '
__fc_block='(^[[:space:]]*|;[[:space:]]*)(\}|\)|done|fi|esac)[[:space:]]*(<[^>]*)?([0-9]*|&)>+\|?[[:space:]]*[^&(|>[:space:]]'
__fc_assignment='^[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?='
__fc_count=0 __fc_busy=0 __fc_path=${TRACE_PATH-$PATH}
# A script of sed: commands that neither write a file nor start a program. A "[" is only the start of a complete list.
__fc_part='\\.|\[\^?]?([^]\\[]|\[:[a-z]+:])*]'
__fc_sed="([0-9]+|\\$|/([^/\\\\[]|$__fc_part)*/)" __fc_sed="($__fc_sed(,$__fc_sed)?)?[[:space:]]*!?[[:space:]]*" __fc_parts=
for __fc_name in / '|' '#' , @ : % !; do
  __fc_parts+="${__fc_parts:+|}s[$__fc_name]([^$__fc_name\\\\[]|$__fc_part)*[$__fc_name]([^$__fc_name\\\\]|\\\\.)*[$__fc_name][gpIim0-9]*"
done
__fc_sed="^([;{}[:space:]]|$__fc_sed($__fc_parts|:?b?a|[]=dDgGhHlnNpPqx])[[:space:]]*([;}]|\$))*\$"

# The usual last commands of pipelines only read, and are recorded: bash reports 127 for a pipeline whose last command is
# skipped.
tee() { cat; local __fc_busy=1; __fc_exports= __fc_record skipped tee "$@"; }
xargs() { cat > /dev/null; local __fc_busy=1; __fc_exports= __fc_record skipped xargs "$@"; }

# A script that is read for another machine may enter folders and read files that are only there.
if [[ -n ${TRACE_ELSEWHERE-} ]]; then
  HOSTNAME=localhost
  hostname() { echo localhost; }
  cd() { if builtin cd "$@" 2> /dev/null; then __fc_away=; else __fc_away=${*: -1}; fi; }
  pushd() { builtin pushd "$@" &> /dev/null || builtin pushd . > /dev/null; }
  git() { pwd; }
  wait() { :; }
fi

# With TRACE_ELSEWHERE=2, a script goes on where it gives up: for lack of a file, a tool or a variable. One that gives up
# 50 times is in a loop.
if [[ ${TRACE_ELSEWHERE-} == 2 ]]; then
  __fc_exits=0
  exit() { local __fc_exit=${1:-$?}; [[ $((++__fc_exits)) != 50 && $__fc_exit != 0 ]] || builtin exit 0; }
  # What it demands with ${NAME:?...} is a placeholder.
  __fc_text=${BASH_EXECUTION_STRING-$(command cat -- "$0" 2> /dev/null)}
  while [[ $__fc_text =~ \$\{([A-Za-z_][A-Za-z0-9_]*):?\? ]]; do
    __fc_text=${__fc_text#*"${BASH_REMATCH[0]}"}
    __fc_name=${BASH_REMATCH[1]}
    [[ -n ${!__fc_name-} ]] || printf -v "$__fc_name" '[%s]' "$__fc_name"
  done
fi
__fc_unset=${TRACE_UNSET-}

# Split $1 at its top-level spaces into __fc_words, as written; __fc_redirections is what follows the words.
__fc_split() {
  local - LC_ALL=C text=$1 word= context= char pair rest i=0  # in C, the place of a character is known
  __fc_words=() __fc_redirections=
  if [[ $text != *[\\\'\"\`\$\(\)\{\}\<\>]* ]]; then set -f; __fc_words=($text); return; fi
  while ((i < ${#text})); do
    char=${text:i:1} pair=${text:i:2}
    case $char in
      '\') word+=$pair; ((i += 2)); continue ;;
      "'") if [[ ${context: -1} != '"' ]]; then
             rest=${text:i+1} rest=${rest%%\'*}
             word+="'$rest'"; ((i += ${#rest} + 2)); continue
           fi ;;
      '"' | '`') if [[ ${context: -1} == "$char" ]]; then context=${context%?}; else context+=$char; fi ;;
      '$') if [[ $pair == '$(' || $pair == '${' ]]; then
             context+=${pair:1} word+=$pair; ((i += 2)); continue
           fi ;;
      '(') [[ ${context: -1} == '"' ]] || context+='(' ;;
      ')') [[ ${context: -1} != '(' ]] || context=${context%?} ;;
      '}') [[ ${context: -1} != '{' ]] || context=${context%?} ;;
      '<' | '>') if [[ -z $context && $pair == ?'(' ]]; then
                   context='(' word+=$pair; ((i += 2)); continue
                 elif [[ -z $context ]]; then
                   [[ $word =~ ^([0-9]*|&|\{.*\})$ ]] || __fc_words+=("$word")
                   __fc_redirections=$word${text:i}; return
                 fi ;;
      ' ' | $'\t' | $'\n') if [[ -z $context ]]; then
                   [[ -z $word ]] || __fc_words+=("$word")
                   word=; ((i += 1)); continue
                 fi ;;
    esac
    word+=$char; ((i += 1))
  done
  [[ -z $word ]] || __fc_words+=("$word")
}

# Whether redirections write a file. A ">" in a here-document counts, too: nothing must be written by mistake.
__fc_writes() {
  local rest=$1
  while [[ $rest =~ ([0-9]*|\&)\>+\|?\ *(\&\ ?[0-9-]+|\&?\ ?/dev/(null|stdout|stderr|tty|fd/[0-9]+)) ]]; do
    rest=${rest/"${BASH_REMATCH[0]}"/}
  done
  [[ $rest == *'>'* ]]
}

# Whether the command $1 runs as written. If not, __fc_asked, __fc_exports and __fc_to are its words, the assignments
# before them, and its redirections, all as written.
__fc_look() {
  local IFS=$' \t\n' text=$1 status
  shopt -s extdebug
  [[ -z ${TRACE_ELSEWHERE-} ]] || set +e  # commands fail for lack of the files of the other machine
  [[ ${TRACE_ELSEWHERE-} != 2 ]] || set +u
  if ((__fc_busy)) || [[ $text == __fc_* || ($text == 'trap - DEBUG' && ${FUNCNAME[1]-} == __fc_decide) ]]; then
    return 0
  fi
  __fc_busy=1
  __fc_runs "$text"
  status=$?
  __fc_busy=0
  return "$status"
}

# Add to __fc_unset the names of the variables in $1, a command or an assignment, that are not set and have no default.
__fc_name_unset() {
  local rest=$1 name
  [[ -n ${TRACE_ELSEWHERE-} ]] || return 0
  while [[ $rest =~ \'[^\']*\' ]]; do rest=${rest/"${BASH_REMATCH[0]}"/}; done
  while [[ $rest =~ \$\(\(([^()]*)\)\) ]]; do  # names in arithmetic
    rest=${rest/"${BASH_REMATCH[0]}"/}
    for name in ${BASH_REMATCH[1]//[!A-Za-z0-9_]/ }; do [[ $name != [A-Za-z_]* ]] || rest+=" \$$name"; done
  done
  while [[ $rest =~ \$(([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\}) ]]; do
    name=${BASH_REMATCH[2]}${BASH_REMATCH[3]} rest=${rest#*"${BASH_REMATCH[0]}"}
    [[ -n ${!name+set} || $name == *PATH || " $__fc_unset " == *" $name "* ]] || __fc_unset+="${__fc_unset:+ }$name"
  done
}

__fc_runs() {
  local text=$1 exports=
  while [[ $text =~ ^(\!|time|time -p)\ (.*)$ ]]; do text=${BASH_REMATCH[2]}; done
  [[ ! $text =~ $__fc_assignment ]] || __fc_name_unset "$text"
  [[ $text =~ ^(\[\[|\(\(|for|case|select|function)([[:space:]]|$|\() || $text =~ ${__fc_assignment}\( ]] && return 0
  __fc_split "$text"
  while ((${#__fc_words[@]})) && [[ ${__fc_words[0]} =~ $__fc_assignment ]]; do
    exports+=" ${__fc_words[0]}"; __fc_words=("${__fc_words[@]:1}")
  done
  ((${#__fc_words[@]})) || return 0
  if [[ ${__fc_words[0]} == '[' || ${__fc_words[0]} =~ ^[A-Za-z0-9_./:+-]+$ ]] && ! __fc_writes "$__fc_redirections"; then
    case ${__fc_words[0]##*/} in
      command | env | find | sed | shuf | sort | source | .) ;;
      *) __fc_harmless "${__fc_words[@]}" && return 0 ;;
    esac
  fi
  __fc_name_unset "${__fc_words[*]}"
  __fc_asked=${__fc_words[*]} __fc_exports=$exports __fc_to=$__fc_redirections
  return 1
}

# Whether a command with these words only computes.
__fc_harmless() {
  local name=$1
  shift
  [[ $name == command && ${1-} == -[vV] ]] && return 0
  declare -F -- "$name" > /dev/null && return 0
  [[ $__fc_builtins != *" $name "* ]] ||
    { [[ $__fc_skipped_builtins != *" $name "* && $name != exec && $name != command ]]; return; }
  # A program of the script's own folders is not a tool, whatever its name.
  [[ -z ${TRACE_ELSEWHERE-} || $name =~ ^/(usr/)?bin/[^/]+$ ]] ||
    { type -P -- "$name" > /dev/null && [[ $name != */* && $(type -P -- "$name") == "$(PATH=$__fc_path type -P -- "$name")" ]]; } || return 1
  case ${name##*/} in
    sed) __fc_reads_sed "$@"; return ;;
    awk | gawk | mawk) __fc_reads_awk "$@"; return ;;
    find) [[ " $* " != *' -delete '* && " $* " != *' -exec'* && " $* " != *' -ok'* && " $* " != *' -f'[pl]* ]]; return ;;
    sort | shuf) [[ ! " $* " =~ \ (-[A-Za-z]*o|--(o|c|f|t)) ]]; return ;;
    uniq) [[ ! " $* " =~ \ [^-\ ][^\ ]*\ +[^-\ ] ]]; return ;;  # the second file is written
    date) [[ ! " $* " =~ \ (-[A-Za-z]*s|--s|[0-9]{8,}) ]]; return ;;
    hostname) [[ ! " $* " =~ \ ([^-\ ]|-[A-Za-z]*[bF]|--(b|f*i)) ]]; return ;;
    ss) [[ ! " $* " =~ \ (-[A-Za-z]*K|--k) ]]; return ;;
    *-smi | ixsmi | cnmon) [[ "$* " =~ ^((-[Llqiam]|--(list|query|format|id|show|csv|json)[^\ ]*|[0-9,]+|topo|info|list)\ +)*\ *$ ]]; return ;;
    env) (($# == 0)); return ;;
    git) [[ ${1-} == rev-parse || ${1-} == describe ]]; return ;;
    scontrol) [[ ${1-} == show ]]; return ;;
    tail) [[ " $* " != *' -'[fF]* && " $* " != *' --f'* ]]; return ;;
    conda | mamba | micromamba) [[ -z ${TRACE_ELSEWHERE-} && ${1-} == shell* && -p /dev/fd/1 ]]; return ;;
    lmod | modulecmd*) [[ -z ${TRACE_ELSEWHERE-} ]]; return ;;
    python | python3 | python3.[0-9]* | perl)
      [[ ${1-} == -[ce] && -p /dev/fd/1 ]] && [[ -z ${TRACE_ELSEWHERE-} || ${2-} =~ ^print\((int|round|[0-9+*/%().,\ -])+\)$ ]]
      return ;;
  esac
  [[ $__fc_tools == *" ${name##*/} "* ]]
}

# Whether sed with these words only reads: expressions of substitutions and printing, in options without a file.
__fc_reads_sed() {
  local word script= given=
  while (($#)); do
    word=$1; shift
    case $word in
      -e | -[nErsuz]*e | --expression) script+=";${1-}" given=1; (($#)) && shift ;;
      --expression=*) script+=";${word#*=}" given=1 ;;
      --quiet | --silent | --regexp-extended | --null-data) ;;
      -*) [[ $word =~ ^-[nErsuz]*$ ]] || return 1 ;;
      *) [[ -n $given ]] || script+=";$word" given=1 ;;
    esac
  done
  [[ $script =~ $__fc_sed ]]
}

# Whether awk with these words only reads: no program of a file, no pipe, no other program, and no ">" in an action.
__fc_reads_awk() {
  while [[ ${1-} == -[Fv]* ]]; do
    [[ $1 != -? ]] || shift
    (($#)) && shift
  done
  [[ ${1-} != -* && ${1//||/} != *['|@']* && ${1-} != *system* && ${1-} != *getline* && ${1-} != *'{'*'>'* ]]
}

# Whether a loop only waits, when it sleeps: it started nothing in the background since it last slept, and no other command
# than before. Then the repeated records are removed, unless they may be those of copies in the background.
__fc_waits() {
  local file words round=$'\n' is_new=
  local -a fields repeated=()
  for file in "$FLAGCORE_TRACE"/*; do
    [[ $__fc_seen != *" ${file##*/} "* ]] || continue
    __fc_seen+=" ${file##*/} "
    mapfile -d '' -t fields < "$file"
    [[ ${fields[3]-} != sleep ]] || continue
    words=${fields[*]:3:${fields[2]}}
    round+=$words$'\n' repeated+=("$file")
    [[ $__fc_round == *$'\n'"$words"$'\n'* ]] || is_new=1
  done
  if [[ -z $is_new && $__fc_round && ${!-} == "$__fc_job" ]]; then
    [[ ${!-} != "$__fc_first_job" ]] || command rm -f -- "${repeated[@]}"
    return 0
  fi
  __fc_round=$round __fc_job=${!-}
  return 1
}

# Whether `command -v $1` runs as written. Programs that are not tools are on the other machine: it succeeds.
__fc_is_here() {
  [[ -z ${TRACE_ELSEWHERE-} || -p /dev/fd/1 || $__fc_tools == *" ${1##*/} "* ]]
}

# Write the record of a command: its kind, and its words.
__fc_record() {
  [[ -z $__fc_exports ]] || eval "export$__fc_exports"
  { printf '%s\0' "$1" "$PWD" "$(($# - 1))" "${@:2}"; command env -0 ${__fc_unset:+TRACE_UNSET="$__fc_unset"}; } > "$FLAGCORE_TRACE/$BASHPID.$RANDOM$RANDOM"
}

# Refuse a script whose blocks write files: no trap sees their redirections.
__fc_check_blocks() {
  local line
  [[ -f $1 && -r $1 ]] || return 0
  line=$(command grep -nE "$__fc_block|__fc_" -- "$1" | command grep -vE '(>|&)[[:space:]]*/dev/null' | command head -n 1)
  [[ -z $line ]] || (__fc_exports= __fc_record block "$1:$line")
  [[ -z $line ]]
}

# Decide on the command with the expanded words __fc_call, in a subshell: 0 to skip it, 1 to run it, 3 to end the script.
# Functions that write a file run here, without that, and their commands are traced.
__fc_decide() {
  trap - DEBUG
  set +a  # else the variables below are exported
  if [[ ${__fc_call[0]-} == command && ${__fc_call[1]-} == -[vV] ]] && ! __fc_is_here "${__fc_call[2]-}"; then return 0; fi
  local IFS=$' \t\n' first=${__fc_call[0]-}
  ((${#__fc_call[@]})) || return 1
  if [[ $first == source || $first == . ]]; then
    if [[ -n ${TRACE_ELSEWHERE-} && ! -r ${__fc_call[1]-} ]]; then
      [[ ${__fc_call[1]-} == @(|/@(etc|opt|usr)/*) ]] || __fc_record skipped "${__fc_call[1]}" 'a sourced file that is not here'
      return 0
    fi
    __fc_check_blocks "${__fc_call[1]-}" || return 3
  fi
  if ! __fc_writes "$__fc_to"; then
    __fc_harmless "${__fc_call[@]}" && return 1
  elif [[ $first == eval || $first == source || $first == . || $(type -t -- "$first") == function ]]; then
    trap "$__fc_trap" DEBUG
    "${__fc_call[@]}"
    return 0
  fi
  __fc_unwrap
  if ((${#__fc_call[@]})); then
    __fc_leave
    [[ $first != exec ]] || return 3
  fi
  return 0
}

# Record the command in __fc_call, or trace the script that it starts.
__fc_leave() {
  case ${__fc_call[0]##*/} in
    bash) __fc_child "${__fc_call[@]:1}" ;;
    sh | dash) __fc_no_functions; __fc_child "${__fc_call[@]:1}" ;;
    ssh) __fc_remote "${__fc_call[@]:1}" ;;
    *) [[ -z ${__fc_away-} || ${__fc_call[0]} != [!/]*/* ]] || __fc_call[0]=$__fc_away/${__fc_call[0]#./}
       if ! __fc_is_script "${__fc_call[0]}"; then __fc_record skipped "${__fc_call[@]}"; return; fi
       [[ $__fc_first == *bash* ]] || __fc_no_functions
       __fc_child "${__fc_call[@]}" ;;
  esac
}

# Trace the command that ssh with these words runs on another host, or record ssh if there is none.
__fc_remote() {
  local words=("$@")
  while [[ ${1-} == -* ]]; do
    if [[ $1 == -*([46AaCfGgKkMNnqsTtVvXxYy])[BbcDEeFIiJLlmOoPpQRSWw] ]]; then shift; fi  # its value is the next word
    (($#)) && shift
  done
  if [[ -z ${TRACE_ELSEWHERE-} ]] || (($# < 2)); then __fc_record skipped ssh "${words[@]}"; return; fi
  __fc_child -c "${*:2}"
}

# Remove from __fc_call what only passes a command on; what `env` sets goes to __fc_exports.
__fc_unwrap() {
  while ((${#__fc_call[@]})); do
    case ${__fc_call[0]##*/} in
      exec | command | nohup | setsid) __fc_call=("${__fc_call[@]:1}") ;;
      env)
        [[ ${__fc_call[1]-} == -* ]] && return
        __fc_call=("${__fc_call[@]:1}")
        while [[ ${__fc_call[0]-} == *=* ]]; do
          __fc_exports+=" ${__fc_call[0]%%=*}=$(printf %q "${__fc_call[0]#*=}")"; __fc_call=("${__fc_call[@]:1}")
        done ;;
      *) return ;;
    esac
  done
}

__fc_is_script() {
  __fc_first=
  [[ $1 == */* && ${1##*/} != torchrun && -f $1 && -r $1 ]] || return 1
  IFS= read -r __fc_first < "$1" 2> /dev/null
  [[ $__fc_first =~ ^\#\!.*/(env\ )?(ba|da)?sh ]]
}

# Other shells than bash do not see its exported functions.
__fc_no_functions() {
  local name
  while read -r _ _ name; do export -n -f "$name"; done < <(declare -Fx)
}

__fc_child() {
  [[ -z $__fc_exports ]] || eval "export$__fc_exports"
  BASH_ENV=$BASH_ENV FLAGCORE_TRACE=$FLAGCORE_TRACE TRACE_UNSET=$__fc_unset TRACE_PATH=$__fc_path command bash ${TRACE_ELSEWHERE:+--noprofile} "$@"
}

# Act on a decision; the status says whether bash skips the command: 0 is yes.
__fc_act() {
  [[ $1 != 3 ]] || exit 0
  ((++__fc_count < 300)) || exit 0
  [[ $1 == 0 ]]
}

exec {BASH_XTRACEFD}> /dev/null  # the output of `set -x` would contain the commands of the trap
export -n BASH_ENV FLAGCORE_TRACE TRACE_UNSET TRACE_PATH
[[ ${BASH_EXECUTION_STRING-} != *__fc_* ]] || exit 0
[[ -n ${BASH_EXECUTION_STRING-} ]] || __fc_check_blocks "$0" || exit 0
: &  # scripts read $! after a command that is skipped
__fc_first_job=$! __fc_job= __fc_round= __fc_seen=
set -T
trap '' PIPE  # what reads the output may be skipped
# The words are expanded in the script's own context, and in a subshell: there, too, the trap sees their commands.
# Its status is looked at in a list, for `set -e` ends the script at any other. A loop that only waits ends when it sleeps for
# the second time.
__fc_trap='__fc_look "$BASH_COMMAND" || { __fc_said=0
  if [[ $__fc_asked == sleep\ * ]] && __fc_waits; then ! break 2> /dev/null; else
    (eval "__fc_call=($__fc_asked)"; __fc_decide "$@") || __fc_said=$?
  fi
  ! __fc_act "$__fc_said"; }'
trap "$__fc_trap" DEBUG
