"""An app of DSPy: `dspy_app.py STORE URL`. Prints the patch's `status()`."""

import inspect
import json
import sys

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

import dspy  # noqa: E402

engine = {"engine": "litellm"} if "engine" in inspect.signature(dspy.LM.__init__).parameters else {}


def model(name: str) -> dspy.LM:
    """Give a model of the server."""
    return dspy.LM(f"openai/{name}", api_base=sys.argv[2], api_key="sk-test", cache=False, **engine)


class Colour(dspy.Signature):
    """Name a colour."""

    at: str = dspy.InputField()
    colour: str = dspy.OutputField()


class Guide(dspy.Module):
    """Looks, and then asks for a rhyme."""

    def __init__(self) -> None:
        """Make its parts."""
        super().__init__()
        self.look = dspy.ReAct(Colour, [look], max_iters=2)
        self.rhyme = dspy.Predict("colour -> rhyme")

    def forward(self, at: str) -> dspy.Prediction:
        """Do both."""
        return self.rhyme(colour=self.look(at=at).colour)


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def exact(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> bool:
    """Whether the colour is right."""
    return example.colour == prediction.colour


class Heard(dspy.utils.callback.BaseCallback):
    """A callback of the app's own."""

    modules = 0

    def on_module_start(self, **told: object) -> None:
        """Count."""
        self.modules += 1


heard = Heard()
dspy.configure(lm=model("gpt-guide"), callbacks=[heard])
assert Guide()(at="sky").rhyme == "true"
with dspy.context(lm=model("gpt-eval")):
    examples = [dspy.Example(at=at, colour="blue").with_inputs("at") for at in ("sky", "grass")]
    judged = dspy.Evaluate(devset=examples, metric=exact, num_threads=2, display_progress=False)(dspy.Predict(Colour))
assert judged.score == 50.0

assert art.flush(30)
told = art.status()
art.unpatch()
assert dspy.Predict(Colour)(at="sky").colour == "blue"  # not recorded any more
shown = {
    "instrumented": told.instrumented,
    "errors": dict(told.errors),
    "bypasses": dict(told.bypasses),
    "heard": heard.modules,
}
print(json.dumps(shown))
