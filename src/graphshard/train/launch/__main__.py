# SPDX-License-Identifier: Apache-2.0
"""``python -m graphshard.train.launch CONFIG``: one rank of what the launcher started.

That is a training run, a prediction, a trace of steps, or a calibration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from .._config import config_from_json
from ._training import rank_work
from ._worker import run_as_worker


def _work(text: str) -> Callable[[], None]:
    mode = json.loads(text)["mode"]
    if mode == "predict":
        from .._predict import PredictRequest, prediction_work

        return prediction_work(PredictRequest.from_json(text))
    if mode == "trace":
        from .._step_trace import TraceRequest, trace_work

        return trace_work(TraceRequest.from_json(text))
    if mode == "calibrate":
        from .._calibrate import CalibrationRequest, calibration_work

        return calibration_work(CalibrationRequest.from_json(text))
    return rank_work(config_from_json(text))


if __name__ == "__main__":
    run_as_worker(lambda: _work(sys.argv[1]))
