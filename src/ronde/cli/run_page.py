"""The options of `ronde run` as Markdown, for docs/launcher.md.

python -m ronde.cli.run_page docs/launcher.md     # brings the page up to date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ronde.cli.options import Option
from ronde.cli.run_arguments import OPTIONS

__all__ = ["BEGIN", "END", "HOROVODRUN", "TORCHRUN", "document", "update"]

BEGIN, END = "<!-- options: printed by python -m ronde.cli.run_page -->\n", "<!-- end of options -->\n"

# The options, by their last names, that the other two launchers have.
_TORCHRUN = """
--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts
--monitor-interval --start-method --event-log-handler --role --module --no-python --run-path --log-dir
--redirects --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank
--master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout
--virtual-local-rank --help
"""
_HOROVODRUN = """
--version --num-proc --check-build --disable-cache --start-timeout --network-interfaces --output-filename
--verbose --config-file --ssh-port --ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity
--hierarchical-allreduce --hierarchical-allgather --torus-allreduce --autotune --autotune-log --autotune-warmup-samples
--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-num-proc
--max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename
--timeline-mark-cycles --stall-check --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds
--mpi-threads-disable --mpi-args --tcp --binding-args --num-nccl-streams --thread-affinity
--gloo-timeout-seconds --log-level --no-log-hide-timestamp --prefix-output-with-timestamp --hosts --hostfile
--host-discovery-script --gloo --mpi --jsrun --help
"""

TORCHRUN, HOROVODRUN = frozenset(_TORCHRUN.split()), frozenset(_HOROVODRUN.split())


def document(table: Sequence[Option] = OPTIONS) -> str:
    """Return all options, by group, as tables."""
    lines = []
    shown = [option for option in table if not option.refused]
    for group in dict.fromkeys(option.group for option in shown):
        lines += [f"### {group[0].upper()}{group[1:]}", "", "| option | also | meaning |", "|---|---|---|"]
        lines += [_row(option) for option in shown if option.group == group]
        lines.append("")
    lines += ["### Not supported", "", "| option | also | instead |", "|---|---|---|"]
    lines += [_row(option) for option in table if option.refused]
    return "\n".join(lines) + "\n"


def update(page: str) -> str:
    """Return the page with the options as they are now. Raises ValueError if it has no place for them."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page lacks the line {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n{document()}\n{END}{after}"


def _row(option: Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.names + option.off)
    value = f" {option.metavar}" if option.metavar else ""
    others = [who for who, has in (("torchrun", TORCHRUN), ("horovodrun", HOROVODRUN)) if option.name in has]
    meaning = option.help.replace("|", "\\|")
    if option.variable and option.variable not in meaning:
        meaning += f" (`{option.variable}`)"
    return f"| {names}{value} | {', '.join(others)} | {meaning} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
