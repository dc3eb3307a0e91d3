# SPDX-License-Identifier: Apache-2.0
"""Rows of named tensors on the hosts of a cluster: servers, and what trainers see of them."""
