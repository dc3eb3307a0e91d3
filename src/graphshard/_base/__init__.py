# SPDX-License-Identifier: Apache-2.0
"""What everything stands on and knows no graph: files, memory, devices, ids, compiled kernels.

Its modules are imported one by one: `files` needs the standard library alone, so that a process
that only watches others need not load torch.
"""
