"""The engines. A table of names; modules are imported when one is opened.

To add one: write `engines/<name>.py` with a class as `engines/base.py` describes, and one line here.
"""

from __future__ import annotations

#: name -> "module:class"
ENGINES: dict[str, str] = {
    "fake": "onepolicy.engines.fake:FakeEngine",
    "recorded": "onepolicy.engines.recorded:RecordedEngine",
    "callable": "onepolicy.engines.user:CallableEngine",
    "hf": "onepolicy.engines.hf:HfEngine",
    "vllm": "onepolicy.engines.vllm:VllmEngine",
    "openvino": "onepolicy.engines.openvino:OpenvinoEngine",
    "http": "onepolicy.engines.http:HttpEngine",
    "https": "onepolicy.engines.http:HttpsEngine",
}
