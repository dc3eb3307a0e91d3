# SPDX-License-Identifier: Apache-2.0
"""Exact outputs for all nodes, layer by layer, in batches of destinations."""

from ._inference import inference
