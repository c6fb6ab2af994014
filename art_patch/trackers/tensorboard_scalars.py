"""Training steps as TensorBoard's scalars, in its own event files.

The run `NAME` has one point a policy: the metrics of `NAME@STEP` stand at STEP. The run `NAME@STEP` has the optimizer
steps of that policy's update, as `update/loss` and so on. A metric that changed, such as the mean reward of a policy
that still serves, is written once more at its step; TensorBoard shows the later value.

Runs of the agent are not sent; they are in the metrics of the policies that answered them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tensorboard.summary import Writer

from art_patch.errors import TrackerError
from art_patch.trackers.episodes import Item, TrainingStep


@dataclass(frozen=True, slots=True)
class _Scalar:
    run: str
    tag: str
    value: float
    step: int
    at: float


class TensorBoard:
    """A directory of event files."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        """Name the directory; it is made when there is something to write."""
        self._directory = directory.absolute()
        self.target = f"tensorboard {self._directory}"

    def of_step(self, step: TrainingStep) -> Iterable[Item]:
        """Return an item for each metric of the policy, and one for the whole history of its update."""
        policy = step.policy
        for name, value in step.metrics.items():
            scalar = _Scalar(policy.model, name, value, policy.step, policy.created_at)
            yield Item(f"policy:{policy.name}:{name}", repr(value), [scalar])
        if step.history:
            scalars = [
                _Scalar(policy.name, f"update/{name}", value, number, policy.created_at)
                for number, metrics in enumerate(step.history)
                for name, value in metrics.items()
            ]
            # An update's history only grows, so its length tells whether it changed.
            yield Item(f"history:{policy.name}", str(len(step.history)), scalars)

    def write(self, items: Sequence[Item]) -> None:
        """Write new event files beside those that are there.

        Raises:
            TrackerError: the directory cannot be written.
        """
        scalars: list[_Scalar] = [scalar for item in items for scalar in item.payload]
        try:
            with ExitStack() as stack:
                # Each `Writer` begins a new file, as event files are not appended to; TensorBoard reads all of them.
                # `@` and spaces stay readable; other characters that a file's name may not hold are quoted.
                runs = {
                    run: stack.enter_context(closing(Writer(str(self._directory / quote(run, safe="@ ")))))
                    for run in sorted({scalar.run for scalar in scalars})
                }
                for one in scalars:
                    runs[one.run].add_scalar(one.tag, one.value, one.step, wall_time=one.at)
        except OSError as error:
            raise TrackerError(f"{self.target} cannot be written: {error}; choose another directory") from error
