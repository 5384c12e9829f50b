# Sourced by bash, through BASH_ENV, before a user's script: runs what only computes, and records and skips the rest.
#
# A DEBUG trap sees each simple command before it runs. Assignments, builtins, functions and tools that only read run as
# written. All others are skipped with status 0; a file per command in FLAGCORE_TRACE has its kind, its directory, the
# number of its words, its expanded words, and the variables that it would have received, each ended by NUL.

__fc_tools=' arch awk basename bc cat cut date df dirname du egrep env expr false fgrep find free gawk getconf grep head
 hostname id jq locale logname ls lscpu lspci mawk nproc nvidia-smi numfmt printenv pwd readlink realpath rev rocm-smi
 mx-smi ixsmi cnmon sed seq sort stat tac tail test tr true uname uniq wc which whoami xargs '
__fc_tools=${__fc_tools//$'\n'/ }
__fc_skipped_builtins=' bind caller compgen complete coproc enable fc hash history kill logout mapfile-none suspend trap '
__fc_block='(^[[:space:]]*|;[[:space:]]*)(\}|\)|done|fi|esac)[[:space:]]*([0-9]*|&)>+\|?[[:space:]]*[^&(|>[:space:]]'
__fc_count=0 __fc_busy=0

# Split $1 at its top-level spaces into __fc_words, as written; __fc_redirections is what follows the words.
__fc_split() {
  local text=$1 word= context= char pair i=0
  __fc_words=() __fc_redirections=
  while ((i < ${#text})); do
    char=${text:i:1} pair=${text:i:2}
    if [[ $char == \\ ]]; then
      word+=$pair; ((i += 2)); continue
    fi
    case $char in
      "'") if [[ ${context: -1} != '"' ]]; then
             local rest=${text:i+1}; rest=${rest%%\'*}
             word+="'$rest'"; ((i += ${#rest} + 2)); continue
           fi ;;
      '"') if [[ ${context: -1} == '"' ]]; then context=${context%?}; else context+='"'; fi ;;
      '`') if [[ ${context: -1} == '`' ]]; then context=${context%?}; else context+='`'; fi ;;
      '$') if [[ $pair == '$(' || $pair == '${' ]]; then
             context+=${pair:1}; word+=$pair; ((i += 2)); continue
           fi ;;
      '(') [[ ${context: -1} == '"' ]] || context+='(' ;;
      ')') [[ ${context: -1} != '(' ]] || context=${context%?} ;;
      '}') [[ ${context: -1} != '{' ]] || context=${context%?} ;;
      '<' | '>') if [[ -z $context && $pair == ?'(' ]]; then
                   context='('; word+=$pair; ((i += 2)); continue
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

# Whether the redirections write a file.
__fc_writes() {
  local rest=$__fc_redirections
  rest=${rest%%<<*}
  while [[ $rest =~ ([0-9]*|\&)\>+\|?\ *(\&\ ?[0-9-]+|\&?\ ?/dev/(null|stdout|stderr|tty|fd/[0-9]+)) ]]; do
    rest=${rest/"${BASH_REMATCH[0]}"/}
  done
  [[ $rest == *'>'* ]]
}

# Prepare the trap's decision on the command $1: __fc_code is what expands its words, in the script's own context.
__fc_look() {
  local IFS=$' \t\n' text=$1
  shopt -s extdebug
  ((__fc_busy)) && return 0
  __fc_busy=1
  __fc_prepare
  __fc_busy=0
}

__fc_prepare() {
  local word
  __fc_code= __fc_argv=() __fc_exports= __fc_run=1
  while [[ $text =~ ^(\!|time|time -p)\ (.*)$ ]]; do text=${BASH_REMATCH[2]}; done
  [[ $text =~ ^(\[\[|\(\(|for|case|select|function)([[:space:]]|$|\() ]] && return 0
  [[ $text =~ ^[A-Za-z_][A-Za-z0-9_]*(\[[^\]]*\])?\+?=\( ]] && return 0
  __fc_split "$text"
  while ((${#__fc_words[@]})) && [[ ${__fc_words[0]} =~ ^[A-Za-z_][A-Za-z0-9_]*(\[[^\]]*\])?\+?= ]]; do
    __fc_exports+=" ${__fc_words[0]}"; __fc_words=("${__fc_words[@]:1}")
  done
  ((${#__fc_words[@]})) || return 0
  word=${__fc_words[0]}
  __fc_run=0
  if [[ $word == '[' || $word =~ ^[A-Za-z0-9_./:+-]+$ ]] && __fc_plain "$word" "${__fc_words[@]:1}"; then
    __fc_argv=("${__fc_words[@]}")
  else
    __fc_code="__fc_argv=(${__fc_words[*]})"
  fi
}

# Whether a command with these words needs no look at its expanded words.
__fc_plain() {
  case $(type -t -- "$1") in
    function) [[ -z $__fc_redirections ]] ;;
    builtin) [[ $1 != exec && $1 != command && $1 != source && $1 != . && ($1 != eval || -z $__fc_redirections) ]] ;;
    *) [[ $1 != env && $__fc_tools == *" ${1##*/} "* ]] ;;
  esac
}

# Whether the command in __fc_argv only computes.
__fc_harmless() {
  local name=$1
  shift
  __fc_writes && return 1
  [[ $name == command && ${1-} == -[vV] ]] && return 0
  case $(type -t -- "$name") in
    function | keyword) return 0 ;;
    builtin) [[ $__fc_skipped_builtins != *" $name "* && $name != exec && $name != command ]]; return ;;
  esac
  case ${name##*/} in
    sed) [[ " $* " != *' -i'* && " $* " != *' --in-place'* ]]; return ;;
    find) [[ " $* " != *' -delete '* && " $* " != *' -exec'* && " $* " != *' -ok'* && " $* " != *' -f'[pl]* ]]; return ;;
    env) (($# == 0)); return ;;
    xargs) [[ $__fc_tools == *" ${1-echo} "* || ${1-echo} == echo ]]; return ;;
    sort) [[ " $* " != *' -o'* && " $* " != *' --output'* ]]; return ;;
    python | python3 | python3.[0-9]* | perl) [[ ${1-} == -[ce] && -p /dev/fd/1 ]]; return ;;
  esac
  [[ $__fc_tools == *" ${name##*/} "* ]]
}

# Write the record of a command: its kind, and its words.
__fc_record() (
  [[ -z $__fc_exports ]] || eval "export$__fc_exports"
  shopt -u extdebug
  { printf '%s\0' "$1" "$PWD" "$(($# - 1))" "${@:2}"; command env -0; } > "$FLAGCORE_TRACE/$BASHPID.$RANDOM$RANDOM"
)

# Refuse a script whose blocks write files: no trap sees their redirections.
__fc_check_blocks() {
  local line
  [[ -f $1 && -r $1 ]] || return 0
  line=$(command grep -nE "$__fc_block" -- "$1" | command grep -vE '(>|&)[[:space:]]*/dev/null' | command head -n 1)
  [[ -z $line ]] && return 0
  __fc_exports= __fc_record block "$1:$line"
  exit 0
}

# Whether bash skips the command: 0 is yes. $@ are the script's own arguments.
__fc_skips() {
  local IFS=$' \t\n' status
  ((__fc_busy || __fc_run)) && return 1
  __fc_busy=1
  __fc_decide "$@"
  status=$?
  __fc_busy=0
  return "$status"
}

__fc_decide() {
  local first
  ((${#__fc_argv[@]})) || return 1
  __fc_harmless "${__fc_argv[@]}" && {
    case ${__fc_argv[0]} in source | .) __fc_check_blocks "${__fc_argv[1]-}" ;; esac
    return 1
  }
  first=${__fc_argv[0]}
  if [[ $first == eval || $first == source || $first == . || $(type -t -- "$first") == function ]]; then
    local -a __fc_call=("${__fc_argv[@]}")
    (__fc_busy=0; "${__fc_call[@]}")
    return 0
  fi
  __fc_unwrap
  if ((${#__fc_argv[@]})); then
    case ${__fc_argv[0]##*/} in
      bash | sh | dash) __fc_child "${__fc_argv[@]:1}" ;;
      *) if __fc_is_script "${__fc_argv[0]}"; then __fc_child "${__fc_argv[@]}"; else __fc_record skipped "${__fc_argv[@]}"; fi ;;
    esac
    [[ $first != exec ]] || exit 0
  fi
  ((++__fc_count < 300)) || exit 0
  return 0
}

# Remove from __fc_argv what only passes a command on; what `env` sets goes to __fc_exports.
__fc_unwrap() {
  while ((${#__fc_argv[@]})); do
    case ${__fc_argv[0]##*/} in
      exec | command | nohup | setsid) __fc_argv=("${__fc_argv[@]:1}") ;;
      env)
        [[ ${__fc_argv[1]-} == -* ]] && return
        __fc_argv=("${__fc_argv[@]:1}")
        while [[ ${__fc_argv[0]-} == *=* ]]; do
          __fc_exports+=" ${__fc_argv[0]%%=*}=$(printf %q "${__fc_argv[0]#*=}")"; __fc_argv=("${__fc_argv[@]:1}")
        done ;;
      *) return ;;
    esac
  done
}

__fc_is_script() {
  local line=
  [[ $1 == */* && -f $1 && -r $1 ]] || return 1
  IFS= read -r line < "$1" 2> /dev/null
  [[ $line =~ ^\#\!.*/(env\ )?(ba|da)?sh ]]
}

# Trace another script.
__fc_child() (
  [[ -z $__fc_exports ]] || eval "export$__fc_exports"
  shopt -u extdebug
  command bash "$@"
)

[[ -n ${BASH_EXECUTION_STRING-} ]] || __fc_check_blocks "$0"
set -T
trap '__fc_look "$BASH_COMMAND"; eval "$__fc_code"; ! __fc_skips "$@"' DEBUG
