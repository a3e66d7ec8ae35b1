"""No constant is fitted to a plan that is far beyond the budget."""

from types import SimpleNamespace
from typing import Any, cast

from small_configs import plan_of

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.correction import PlanCorrections
from loka_onnx.pipeline import correcting
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.correcting import HOPELESS, Correcting

SPEC = OutputSpec("ctr", OutputKind.LOGIT, "clicked", budget=0.001)


def test_a_plan_far_beyond_the_budget_is_not_simulated(tmp_path, monkeypatch):
    config: Any = SimpleNamespace(
        output_specs=(SPEC,),
        threads=1,
        plan=SimpleNamespace(corrections=True),
        outputs=(),
        columns=(),
        data=SimpleNamespace(group=None),
        calibration=SimpleNamespace(batch_size=8, seed=0, rows=None),
    )
    directory: Any = SimpleNamespace(path=tmp_path)
    context = Context(config, directory, exported=cast(Any, None))
    context.__dict__["splits"] = SimpleNamespace(calibration=None, selection=None)
    stage = Correcting(context, cast(Any, SimpleNamespace(sites=())))
    monkeypatch.setattr(Correcting, "_reference", lambda self: None)
    fitted: list[str] = []
    monkeypatch.setattr(
        correcting, "fit_biases", lambda model, plans, *rest: fitted.extend(each.id for each in plans)
    )
    monkeypatch.setattr(
        Correcting, "_tried", lambda self, each, *fit: PlanCorrections(each.id, 9, (), {}, ())
    )
    limit = HOPELESS * SPEC.budget
    plans = [
        plan_of(name, ["fc"], predicted_kl={"ctr": kl})
        for name, kl in (("far", 1.01 * limit), ("near", limit))
    ]
    found = stage.fit(plans).plans
    assert fitted == ["near"]
    assert [(each.plan, bool(each.failure)) for each in found] == [("far", True), ("near", False)]
