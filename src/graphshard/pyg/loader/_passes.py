# SPDX-License-Identifier: Apache-2.0
"""SourceLoader: how the loaders pass over their seeds: threads, steps that ranks share, draws.

`PrefetchLoader` puts what a loader gives on a GPU.

::

    caller's thread        sample                features
    places of a batch ──>  neighbours are  ──>   rows come,        ──> caller
    (torch's sampler)      drawn                 transforms run

With ``num_workers`` each stage has a thread, and each that communicates a process group of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..._base.device import device_of
from ...comm import ThreadGroups
from ...comm.collectives import verify
from ...sampling import DrawSeed
from ...sampling.loader import DeviceStream, LoaderResources, Pipeline, Run, Stage, moved
from ._samplers import SourceSampler
from ._sources import SamplingSource

_SAMPLE, _FEATURES = "sample", "features"
_AHEAD = 2
_NO_PROCESSES = {
    "worker_init_fn": "what it sets up, set up before the loop",
    "multiprocessing_context": "leave it out",
    "timeout": "what other ranks are waited for has the timeout of the process group",
}


def check_options(options: dict[str, Any]) -> None:
    """Raise if options of torch's loader are among those that only concern worker processes.

    Raises:
        NotImplementedError: They are, and name the alternative.
        ValueError: There are no batches to make.
    """
    for name, instead in _NO_PROCESSES.items():
        if options.get(name):
            raise NotImplementedError(
                f"{name}={options[name]!r} is for worker processes, and num_workers are threads "
                f"here, which share the graph; {instead}"
            )
    if options.get("batch_size", 1) is None and options.get("batch_sampler") is None:
        raise ValueError("batch_size must be a number of seeds (got None); give 1 for single ones")


class SourceLoader:
    """What the loaders have in common; it comes before PyG's class among their bases."""

    _source: SamplingSource

    def _open(self, sampler: SourceSampler, seed: int | None, error: Exception | None) -> None:
        """Agree with the other ranks; the last thing that making a loader does.

        Raises:
            Exception: On all ranks, what went wrong on any.
        """
        loader: Any = self
        source = self._source
        source.share(error)
        options = f"num_workers {loader.num_workers}, prefetch_factor {loader.prefetch_factor}"
        verify(source.state, options, "the options of a loader", None)
        self.epoch, self.seed = 0, sampler.seed if seed is None else seed
        self._most = None if source.is_whole else source.most_steps(len(loader.batch_sampler))
        ahead = loader.num_workers * (loader.prefetch_factor or _AHEAD)
        groups = None
        self._drawing = self._fetching = source
        if ahead and source.is_collective:
            groups = ThreadGroups([_SAMPLE, _FEATURES], source.group)
            self._drawing = source.on(groups.group(_SAMPLE))
            self._fetching = source.on(groups.group(_FEATURES))
        for ntype in source.ntypes if not source.is_whole else ():
            source.prepare(ntype)  # here, and not in two threads
        self._resources = LoaderResources(groups, [])
        self._finalizer = weakref.finalize(self, self._resources.close)
        stages = [Stage(_SAMPLE, self._sampled, self._num_threads(loader.num_workers))]
        if loader.filter_per_worker:
            stages.append(Stage(_FEATURES, self._finished))
        self._pipeline = Pipeline(stages, ahead, None if groups is None else groups.cancelled)

    def _num_threads(self, num_workers: int) -> int:
        """Threads that draw; one where the order of messages counts."""
        return max(1, min(num_workers, torch.get_num_threads())) if self._source.is_whole else 1

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is; each pass counts one up by itself."""
        self.epoch = epoch

    def close(self) -> None:
        """End what still runs; dropping the loader does the same. Not collective."""
        self._finalizer()

    def enable_cpu_affinity(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Accepted for scripts of PyG's; there are no worker processes to bind to processors."""
        return nullcontext()

    def enable_multithreading(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Accepted for scripts of PyG's; threads draw already."""
        return nullcontext()

    def __len__(self) -> int:
        """Batches of a pass, the same on all ranks."""
        loader: Any = self
        return len(loader.batch_sampler) if self._most is None else self._most

    def __iter__(self) -> Iterator[Any]:
        """One pass; every rank of a graph that spans ranks must make it, and leave at one batch."""
        loader: Any = self
        if self._source.is_collective:
            self._step_in()
        epoch, self.epoch = self.epoch, self.epoch + 1
        batches: Any = loader.batch_sampler
        if self._most is not None:
            batches = cut([list(batch) for batch in batches], self._most)
        items = (
            (list(index), DrawSeed(self.seed, epoch, step)) for step, index in enumerate(batches)
        )
        run = self._pipeline.run(items)
        if self._source.is_collective:
            self._resources.keep(run)
        try:
            for batch in run:
                yield batch if loader.filter_per_worker else self._finished(batch)
                del batch
            if self._most is not None and run.num_delivered < self._most:
                raise RuntimeError(
                    "another pass over this loader has begun, or it was closed, which ended this "
                    "pass; make a loader for each"
                )
        except GeneratorExit:
            run.close()
            raise

    def _step_in(self) -> None:
        """Wait for the threads of the last pass; find out whether all ranks are in step."""
        state, groups = self._source.state, self._resources.groups
        error = self._resources.end_of_pass(state.timeout.total_seconds())
        done = [] if groups is None else list(groups.num_operations)
        verify(
            state,
            f"epoch {self.epoch}, operations {done}",
            "where a loader stands at the start of a pass (its epoch; and whether the last pass "
            "was left at the same batch)",
            error,
        )

    def _sampled(self, item: tuple[list[int], DrawSeed]) -> Any:
        raise NotImplementedError

    def _finished(self, out: Any) -> Any:
        loader: Any = self
        data = loader.filter_fn(out)
        if loader.pin_memory and torch.cuda.is_available():
            data = data.pin_memory()
        return data


class PrefetchLoader:
    """PyG's ``PrefetchLoader``: the batches of a loader on a GPU, each copied beside the last step.

    Batches pass through page-locked memory, and the stream that is current in the loop waits for
    the copy of a batch. What the loop drops is not used again before the device is done with it,
    which PyG's class, that takes these loaders too, does not see to.

    Args:
        loader: A loader of this package, of PyG or of torch.
        device: Where batches shall be; by default the current GPU, or the CPU if there is none,
            where batches are given as they are.

    Raises:
        ValueError: Torch has no such device here.

    Example:
        >>> from torch_geometric.data import Data
        >>> from graphshard.pyg import NeighborLoader, PrefetchLoader
        >>> data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
        >>> for batch in PrefetchLoader(NeighborLoader(data, [2], batch_size=2), "cpu"):
        ...     print(batch.batch_size)
        2
        1
    """

    def __init__(self, loader: Any, device: torch.device | str | None = None) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.loader, self.device = loader, device_of(device)
        self._stream = DeviceStream.of(self.device)
        ahead = 0 if self._stream is None else 1
        self._pipeline = Pipeline([Stage("device", self._moved)], ahead, stream=self._stream)

    def __iter__(self) -> Run[Any]:
        """One pass over the loader."""
        return self._pipeline.run(self.loader)

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self.loader)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader})"

    def _moved(self, batch: Any) -> Any:
        return moved(batch, self.device, pin=True)


def cut(batches: Sequence[list[int]], num_steps: int) -> list[list[int]]:
    """The same places in ``num_steps`` batches of sizes that differ by one at most.

    Args:
        batches: As torch's sampler made them, ``num_steps`` at most.
        num_steps: What the rank with the most batches has.

    Raises:
        ValueError: There are more.
    """
    if len(batches) > num_steps:
        raise ValueError(
            f"the sampler made {len(batches)} batches, and said {num_steps} when the loader was "
            "made; a sampler of a graph that spans ranks makes as many in each pass"
        )
    if len(batches) == num_steps:
        return list(batches)
    places = [place for batch in batches for place in batch]
    bounds = [step * len(places) // num_steps for step in range(num_steps + 1)]
    return [places[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
