# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a cluster: its rows by original id, with the state of models and optimizers.

::

    checkpoint_dir/
    ├── step-00000020/
    │   ├── manifest.json          tables, plain values of the states, digests
    │   ├── shared.safetensors     tensors of the states
    │   ├── rank-0.safetensors     the rows that trainer 0 wrote, and their original ids
    │   └── rank-1.safetensors ...
    └── step-00000010/ ...         see `graphshard.servers.checkpoints`
"""

from ._load import ClusterCheckpoint, load_checkpoint
from ._restore import RestoredTables, restore_tables
from ._save import save_checkpoint
