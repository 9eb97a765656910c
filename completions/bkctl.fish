# fish completion for bkctl

function __bkctl
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    _BKCTL_COMPLETE=fish $words[1] $words[2..-1] "$word" 2>/dev/null
    if test $status = 3
        set -l lead (string match -r -- '^--[^=]*=' "$word")
        printf '%s\n' "$lead"(__fish_complete_path (string replace -- "$lead" '' "$word"))
    end
end

complete -c bkctl -f -a '(__bkctl)'
