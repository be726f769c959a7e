"""The workflow of the bundled MAR pair, run in the server."""

import numpy as np
import pytest
from host_api import to_api
from scd_tests.host.test_image_models import finished, of_type

pytestmark = [pytest.mark.host, pytest.mark.slow]

NAME = "SCD continuous speculative"


def test_workflow_draws_with_a_draft_and_alone(host):
    prompt = to_api(host.workflow(NAME), host.object_info)
    samplers = of_type(prompt, "SCD_ContinuousSampler")
    assert len(samplers) == 2 and sum("draft_model" in prompt[number]["inputs"] for number in samplers) == 1
    for number in samplers:
        prompt[number]["inputs"] |= {"steps": 12, "diffusion_steps": 12, "batch_size": 1}
    result = finished(host.run(prompt))
    reports = {"draft_model" in prompt[number]["inputs"]: result.outputs[number]["text"][0] for number in samplers}
    assert "cspd-" in reports[True] and "of the draft" in reports[True] and "drafts taken" in reports[True]
    assert "method mar (lossless)" in reports[False]
    pictures = host.pictures(result)
    assert len(pictures) == 2 and all(picture.shape == (256, 256, 3) for picture in pictures)
    assert all(picture.std() > 15 for picture in pictures) and not np.array_equal(*pictures)
