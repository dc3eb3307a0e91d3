# SPDX-License-Identifier: Apache-2.0
"""Negative samplers, under the names that they have in DGL."""

from ..sampling.sampler import GlobalUniform, NegativeSampler, PerSourceUniform, Uniform

__all__ = ["GlobalUniform", "NegativeSampler", "PerSourceUniform", "Uniform"]
