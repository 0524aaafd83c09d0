"""`ronde completion`: prints what a shell needs to complete command lines of `ronde`, made of the tables of options.

1. Options that are refused or have no effect are not offered.
2. A script ends the options of `ronde run`, so after it the shell completes names of files.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from ronde.cli import HELP as OVERVIEW
from ronde.cli import VERBS, show
from ronde.cli.options import Option, describe_options, nearest, parse_options
from ronde.errors import UsageError

__all__ = ["HELP", "SHELLS", "run"]

SHELLS = ("bash", "zsh", "fish")
OPTIONS = (Option("information", ("-h", "--help"), "print this help"),)
MOST_OF_HELP = 70  # characters
FILES = ("FILE", "DIR", "PATH")  # placeholders of values that are names of files

HELP = f"""\
usage: ronde completion bash|zsh|fish

Prints a script with which the shell completes command lines of ronde. Add this line to

    ~/.bashrc                      source <(ronde completion bash)
    ~/.zshrc, after compinit       source <(ronde completion zsh)
    ~/.config/fish/config.fish     ronde completion fish | source
{describe_options(OPTIONS)}"""


class Verb(NamedTuple):
    """A command of `ronde`. `words`: what its first word can be; none: a file, after which options end."""

    name: str
    summary: str
    options: Sequence[Option]
    words: Sequence[str] = ()


def run(argv: Sequence[str]) -> int:
    """Run the words after `ronde completion` and return the exit code. Raises UsageError."""
    values, rest = parse_options(list(argv), OPTIONS)
    if "--help" in values or not rest:
        show(HELP)
        return 0
    if len(rest) > 1 or rest[0] not in SHELLS:
        raise UsageError(
            f"{' '.join(rest)!r} is invalid: expected one of bash, zsh and fish{nearest(rest[0], SHELLS)}"
        )
    script = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[rest[0]]
    show(script(verbs()))
    return 0


def verbs() -> list[Verb]:
    """Return all commands with their options."""
    from ronde.cli.run_arguments import OPTIONS as RUN_OPTIONS

    summaries = dict(re.findall(r"^  ronde (\w+) +(.*?)(?: \(see .*\))?$", OVERVIEW, re.MULTILINE))
    words = {"trace": ("merge",), "completion": SHELLS}
    found = []
    for name in VERBS:
        table = RUN_OPTIONS if name == "run" else import_module(f"ronde.cli.{name}").OPTIONS
        if name == "bench":  # whose other options are those of `ronde run`
            known = {each for option in table for each in option.names}
            table = (*table, *(option for option in RUN_OPTIONS if not known & set(option.names)))
        offered = [option for option in table if not option.refused and not option.idle]
        found.append(Verb(name, summaries[name], offered, words.get(name, ())))
    return found


def _names(option: Option) -> tuple[str, ...]:
    return option.names + option.off


def _summary(option: Option) -> str:
    """Return the beginning of its help, for a list of completions."""
    return textwrap.shorten(option.help, MOST_OF_HELP, placeholder=" ...")


def bash_script(commands: Sequence[Verb]) -> str:
    """Return the script for bash."""
    return f"""\
_ronde() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} option= word i
    local -i left=0 given=0
    COMPREPLY=()
    if ((COMP_CWORD < 2)); then
        COMPREPLY=($(compgen -W "{" ".join(verb.name for verb in commands)} --help --version" -- "$cur"))
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        if [[ $word == = ]]; then  # of --option=value
            continue
        elif ((left)); then
            left+=-1
        elif [[ $word == -* ]]; then
            option=$word
            case "$verb $option" in
{_bash_counts(commands)}
            esac
        else
            given+=1
        fi
    done
    if [[ $cur == = ]]; then cur=; fi
    if ((left)); then
        case "$verb $option" in
{_bash_choices(commands)}
        esac
        return
    fi
    case "$verb $given" in
{_bash_offers(commands)}
    esac
}}
complete -o default -F _ronde ronde
"""


def _bash_counts(commands: Sequence[Verb]) -> str:
    lines = []
    for verb in commands:
        for count in sorted({option.words for option in verb.options if option.metavar}):
            names = [
                f'"{verb.name} {name}"'
                for option in verb.options
                if option.metavar and option.words == count
                for name in option.names
            ]
            lines.append(f"            {'|'.join(names)}) left={count} ;;")
    return "\n".join(lines)


def _bash_choices(commands: Sequence[Verb]) -> str:
    return "\n".join(
        f"        {'|'.join(f'{verb.name} {name}'.join(chr(34) * 2) for name in option.names)}) "
        f'COMPREPLY=($(compgen -W "{" ".join(option.kind.choices)}" -- "$cur")) ;;'
        for verb in commands
        for option in verb.options
        if option.kind.choices
    )


def _bash_offers(commands: Sequence[Verb]) -> str:
    lines = []
    for verb in commands:
        options = " ".join(name for option in verb.options for name in _names(option))
        first = f'COMPREPLY=($(compgen -W "{" ".join(verb.words)}" -- "$cur"))' if verb.words else ":"
        pattern = f"{verb.name}\\ *" if verb.words else f'"{verb.name} 0"'
        lines.append(f"    {pattern})")
        lines.append(f'        if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "{options}" -- "$cur"))')
        lines.append(f"        elif ((given == 0)); then {first}; fi ;;")
    return "\n".join(lines)


def zsh_script(commands: Sequence[Verb]) -> str:
    """Return the script for zsh."""
    cases = "\n".join(f"    {verb.name}) _arguments {' '.join(_zsh_specs(verb))} ;;" for verb in commands)
    summaries = " ".join(_quoted(f"{verb.name}:{verb.summary}") for verb in commands)
    return f"""\
#compdef ronde
_ronde() {{
    local -a verbs=({summaries})
    if ((CURRENT == 2)); then
        _describe -t commands 'ronde command' verbs
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in
{cases}
    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _ronde "$@"
else
    compdef _ronde ronde
fi
"""


def _zsh_specs(verb: Verb) -> Iterator[str]:
    for option in verb.options:
        help = re.sub(r"([\[\]\\:])", r"\\\1", _summary(option))
        value = "".join(f":{metavar}:{_zsh_action(option)}" for metavar in _placeholders(option))
        for name in _names(option):
            takes = (
                ""
                if not value or name in option.off
                else "="
                if name.startswith("--")
                else "+" * (len(name) == 2)
            )
            yield _quoted(f"{'*' * option.adds}{name}{takes}[{help}]{'' if name in option.off else value}")
    if verb.words:
        yield _quoted(f"1:command:({' '.join(verb.words)})")
        yield _quoted("*:file:_files")
    else:
        yield _quoted("(-)1:program:_files")
        yield _quoted("*:argument:_files")


def _placeholders(option: Option) -> list[str]:
    if not option.metavar:
        return []
    return option.metavar.split() if option.words > 1 else [re.sub(r"[:\\ ]", " ", option.metavar)]


def _zsh_action(option: Option) -> str:
    if option.kind.choices:
        return f"({' '.join(option.kind.choices)})"
    return "_files" if option.metavar in FILES else " "


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish_script(commands: Sequence[Verb]) -> str:
    """Return the script for fish."""
    lines = [_FISH_BEGINNING.format(cases="\n".join(_fish_counts(commands)))]
    for verb in commands:
        summary = _fish_quoted(verb.summary)
        lines.append(f"complete -c ronde -f -n '__fish_is_nth_token 1' -a {verb.name} -d {summary}")
        if verb.words:
            words = " ".join(verb.words)
            lines.append(f"complete -c ronde -f -n '__ronde_before_words {verb.name}' -a '{words}'")
        place = "__ronde_in" if verb.words else "__ronde_before_words"
        lines += [f"complete -c ronde -n '{place} {verb.name}' {_fish_option(each)}" for each in verb.options]
    return "\n".join(lines) + "\n"


_FISH_BEGINNING = """\
function __ronde_in
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test $words[2] = $argv[1]
end
function __ronde_before_words
    __ronde_in $argv[1]; or return 1
    set -l left 0
    for word in (commandline -opc)[3..-1]
        if test $left -gt 0
            set left (math $left - 1)
        else if not string match -q -- '-*' $word
            return 1
        else
            switch "$argv[1] $word"
{cases}
            end
        end
    end
    return 0
end
"""


def _fish_counts(commands: Sequence[Verb]) -> Iterator[str]:
    for verb in commands:
        for option in verb.options:
            if option.metavar:
                names = " ".join(f"'{verb.name} {name}'" for name in option.names)
                yield f"                case {names}\n                    set left {option.words}"


def _fish_option(option: Option) -> str:
    words = []
    for name in _names(option):
        kind = "l" if name.startswith("--") else "s" if len(name) == 2 else "o"
        words.append(f"-{kind} {name.lstrip('-')}")
    if option.kind.choices:
        words.append(f"-x -a '{' '.join(option.kind.choices)}'")
    elif option.metavar:
        words.append("-r" if option.metavar in FILES else "-x")
    return " ".join([*words, "-d", _fish_quoted(_summary(option))])


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
