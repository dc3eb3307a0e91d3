# SPDX-License-Identifier: Apache-2.0
"""What a run needs, before it is paid for: an epoch on paper, and what is chosen by it."""

from ._choices import budget_of, fits_oneshot, fits_replicated, oneshot_bytes
from ._graphs import SHARES_OF_RANDOM, GraphSize, estimated_parts, sampled_parts
from ._networks import EdgeScorer, Exchanges, LearntColumns, Network, OwnNetwork, PartSize
from ._plan import (
    BATCHES_EVALUATED,
    EXTENDED_BYTES_PER_EDGE,
    STRUCTURE_BYTES_PER_EDGE,
    EpochPlan,
    Machines,
    PartitioningPlan,
    Range,
    RunPlan,
    Sampling,
    best_epoch,
    full_batch_step,
    make_plan,
    plan_full_batch,
    plan_partitioning,
    plan_sampled,
)
from ._rates import Rates, parse_bytes, parse_link, read_rates
from ._tape import AllocationKind, BlockEvent, Memory, StepEvents, Tape, TapeRows

__all__ = [
    "BATCHES_EVALUATED",
    "EXTENDED_BYTES_PER_EDGE",
    "SHARES_OF_RANDOM",
    "STRUCTURE_BYTES_PER_EDGE",
    "AllocationKind",
    "BlockEvent",
    "EdgeScorer",
    "EpochPlan",
    "Exchanges",
    "GraphSize",
    "LearntColumns",
    "Machines",
    "Memory",
    "Network",
    "OwnNetwork",
    "PartSize",
    "PartitioningPlan",
    "Range",
    "Rates",
    "RunPlan",
    "Sampling",
    "StepEvents",
    "Tape",
    "TapeRows",
    "best_epoch",
    "budget_of",
    "estimated_parts",
    "fits_oneshot",
    "fits_replicated",
    "full_batch_step",
    "make_plan",
    "oneshot_bytes",
    "parse_bytes",
    "parse_link",
    "plan_full_batch",
    "plan_partitioning",
    "plan_sampled",
    "read_rates",
    "sampled_parts",
]
