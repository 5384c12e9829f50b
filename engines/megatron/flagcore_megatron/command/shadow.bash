flagcore_start() {{
  local word skip=0 words=()
  if [[ "$*" != *{program}* ]]; then command "$@"; return; fi
  for word in "$@"; do
    if [[ $word == --* || $word == *{program} ]]; then skip=0; fi
    if [[ $skip == 0 ]]; then
      case $word in
        {cases}
      esac
    fi
    if [[ $skip == 0 ]]; then words+=("$word"); else skip=$((skip - 1)); fi
  done
  command "${{words[@]}}" {values}
}}
{functions}
export -f flagcore_start {names}
exec "$@"
