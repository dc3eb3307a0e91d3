# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.dataloading.negative_sampler``."""

from ...sampling.sampler import GlobalUniform as GlobalUniform
from ...sampling.sampler import NegativeSampler as NegativeSampler
from ...sampling.sampler import PerSourceUniform as PerSourceUniform
from ...sampling.sampler import Uniform as Uniform
