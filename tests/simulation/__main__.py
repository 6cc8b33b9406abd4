"""`make sim SEEDS=1000` and `make sim SEED=7`: runs seeds, says how fast, and prints the story of one that fails."""

from __future__ import annotations

import argparse
import sys
import time

from simulation.run import Outcome, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one only, with its trace")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    options = parser.parse_args()
    if options.seed is not None:
        outcome = simulate(options.seed)
        print(*outcome.trace, sep="\n")
        _tell(outcome)
        return 1 if outcome.failure else 0
    began, steps, commits, failed = time.perf_counter(), 0, 0, list[Outcome]()
    for seed in range(options.first, options.first + options.seeds):
        outcome = simulate(seed)
        steps, commits = steps + outcome.steps, commits + outcome.commits
        if outcome.failure:
            failed.append(outcome)
            _tell(outcome)
    took_s = time.perf_counter() - began
    print(f"{options.seeds} seeds, {steps} steps, {commits} commits in {took_s:.1f} s: {steps / took_s:.0f} steps a second")
    print(f"failed: {' '.join(str(outcome.seed) for outcome in failed) or 'none'}")
    return 1 if failed else 0


def _tell(outcome: Outcome) -> None:
    what = outcome.failure or "all promises held"
    print(
        f"seed {outcome.seed}: {what}\n  {outcome.schedulers} schedulers, {outcome.terms} terms, "
        f"{outcome.tasks} tasks, {outcome.starts} starts, {outcome.fences} fences, "
        f"{outcome.lost} lost, {outcome.steps} steps, {outcome.simulated_s:.0f} simulated s in {outcome.took_s:.1f} s, "
        f"trace {outcome.digest}\n  faults: {', '.join(outcome.faults)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
