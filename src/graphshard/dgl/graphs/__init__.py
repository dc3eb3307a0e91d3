# SPDX-License-Identifier: Apache-2.0
"""DGL's library of functions on graphs: what neither training nor partitioning calls."""
