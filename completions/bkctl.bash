# bash completion for bkctl

_bkctl() {
  local IFS=$' \t\n' line=${COMP_LINE:0:COMP_POINT} found breaks=${COMP_WORDBREAKS//[^=:]/}
  local -a typed
  read -r -a typed <<< "$line"
  [[ $line == *' ' ]] && typed+=('')
  COMPREPLY=()
  found=$(_BKCTL_COMPLETE=bash "${typed[@]}" 2>/dev/null)
  [[ $? == 3 ]] && compopt -o default 2>/dev/null
  [[ -n $found ]] && mapfile -t COMPREPLY <<< "$found"
  # A word with = or : is several words to readline: give it only the text behind the last of them.
  line=${typed[-1]}
  [[ -n $breaks && $line == *["$breaks"]* ]] && COMPREPLY=("${COMPREPLY[@]#"${line%"${line##*["$breaks"]}"}"}")
}

complete -F _bkctl bkctl
