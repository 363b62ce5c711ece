"""Clients that other people wrote, unmodified, each in an environment of its own.

They are fetched from the package registry, so they run only where a folder for their environments is given: `--clients FOLDER -m slow`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from firstlight import LLM
from tests.serve.process import Process, server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LIMIT_S = 600
PACKAGES = {
    "langchain": ["langchain-openai==1.7.4"],
    "litellm": ["litellm==1.110.2"],
    "lm-eval": ["lm-eval[api]==0.4.13", "transformers==5.24.0"],
    "guidellm": ["guidellm==0.8.1"],
    "aiperf": ["aiperf==0.13.0"],
}


@pytest.fixture(scope="module")
def running() -> Iterator[Process]:
    with server("--max-context", "4096", "--dtype", "float32") as process:
        yield process


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's bytes as a tokenizer in the form that these clients read: id b is byte b."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shown = {byte: chr(byte) for byte in kept}
    shown |= {byte: chr(256 + place) for place, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    assert letters == sorted(shown.values())
    made = Tokenizer(models.BPE({letter: byte for byte, letter in shown.items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["[BOS]", "[EOS]"])
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[EOS]", "pad_token": "[EOS]", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 258}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The Python of a client's environment, made when it is not there. This environment shows through for torch and whatever else it holds."""
    folder = request.config.getoption("--clients")
    if folder is None:
        pytest.skip("clients of others are fetched and run where --clients FOLDER says")

    def make(name: str) -> Path:
        home = Path(folder).resolve() / name
        python = home / "bin" / "python"
        if not (home / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True, timeout=LIMIT_S)
            (place,) = home.glob("lib/python*/site-packages")
            (place / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True, timeout=LIMIT_S)
            (home / "ready").touch()
        return python

    return make


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """What a client prints; it must end well."""
    # Its own settings and caches stay in the test's folder.
    settings = {**os.environ, "HOME": str(folder), "HF_HOME": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=folder, env={**settings, "PATH": path}, capture_output=True, text=True, timeout=LIMIT_S)
    assert 0 == done.returncode, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
class Pick(BaseModel):
    big: bool
extra = {'thinking': {'type': 'disabled'}}
model = ChatOpenAI(base_url=sys.argv[1] + '/v1', api_key='none', model='default', max_tokens=200, seed=3, extra_body=extra, max_retries=0)
whole = model.invoke('hi', max_tokens=12)
pieces = list(model.stream('hi', max_tokens=12))
picked = model.with_structured_output(Pick, method='json_schema').invoke('choose')
called = model.bind_tools([Pick], tool_choice='required').invoke('choose')
print(json.dumps({
    'whole': whole.content, 'stream': ''.join(piece.content for piece in pieces), 'tokens': whole.usage_metadata['output_tokens'],
    'picked': type(picked.big).__name__, 'called': [call['name'] for call in called.tool_calls][:1]}))
"""

LITELLM = """
import json, sys
import litellm
asked = dict(model='openai/default', api_base=sys.argv[1] + '/v1', api_key='none', messages=[{'role': 'user', 'content': 'hi'}], max_tokens=12,
             seed=3, extra_body={'thinking': {'type': 'disabled'}}, num_retries=0)
whole = litellm.completion(**asked)
pieces = list(litellm.completion(**asked, stream=True, stream_options={'include_usage': True}))
try:
    litellm.completion(**{**asked, 'temperature': 7.0})
    refused = None
except litellm.BadRequestError as error:
    refused = '`temperature` is 7' in str(error)
print(json.dumps({
    'whole': whole.choices[0].message.content or '', 'stream': ''.join(piece.choices[0].delta.content or '' for piece in pieces if piece.choices),
    'tokens': whole.usage.completion_tokens, 'refused': refused}))
"""

LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
lm = LocalCompletionsAPI(base_url=sys.argv[1] + '/v1/completions', model='default', tokenizer=sys.argv[2], max_length=512, num_concurrent=2)
pairs = json.loads(sys.argv[3])
asked = [Instance('loglikelihood', {}, tuple(pair), index) for index, pair in enumerate(pairs)]
rolling = [Instance('loglikelihood_rolling', {}, (pair[0] + pair[1],), index) for index, pair in enumerate(pairs)]
until = [Instance('generate_until', {}, ('hi', {'until': ['e'], 'max_gen_toks': 20, 'temperature': 0}), 0)]
print('RESULT ' + json.dumps([lm.loglikelihood(asked), lm.loglikelihood_rolling(rolling), lm.generate_until(until)]))
"""


def test_langchain(running: Process, installed: Callable[[str], Path], tmp_path: Path) -> None:
    found = json.loads(run([installed("langchain"), "-c", LANGCHAIN, running.url], tmp_path).splitlines()[-1])
    assert found["whole"] == found["stream"]
    assert (True, "bool", ["Pick"]) == (0 < found["tokens"] <= 12, found["picked"], found["called"])


def test_litellm(running: Process, installed: Callable[[str], Path], tmp_path: Path) -> None:
    said = run([installed("litellm"), "-c", LITELLM, running.url], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert found["whole"] == found["stream"]
    assert (True, True) == (0 < found["tokens"] <= 12, found["refused"])


def test_lm_eval(running: Process, installed: Callable[[str], Path], spelled: Path, tmp_path: Path) -> None:
    """Its log likelihoods are those of the logits: of continuations, of whole texts; and whether they are what greedy decoding would say."""
    pairs = [("The first", " light"), ("a", "bc"), ("Once upon a time", " there was"), ("x" * 200, "y" * 40)]
    said = run([installed("lm-eval"), "-c", LM_EVAL, running.url, str(spelled), json.dumps(pairs)], tmp_path, HF_HUB_OFFLINE="1")
    line = next(line for line in said.splitlines() if line.startswith("RESULT "))
    likelihoods, rolling, (text,) = json.loads(line.removeprefix("RESULT "))
    with LLM("default", dtype="float32", cache_bytes=64 << 20, max_context=1024) as llm:
        for (begin, end), (found, greedy), (whole) in zip(pairs, likelihoods, rolling, strict=True):
            ids = [*(begin + end).encode()]
            logprobs_TV = llm.logits(ids).double().log_softmax(-1)
            each = [float(logprobs_TV[place, token]) for place, token in enumerate(ids[1:])]
            assert found == pytest.approx(sum(each[len(begin) - 1 :]), abs=1e-3)
            best = [int(token) for token in logprobs_TV[len(begin) - 1 : -1].argmax(-1)]
            assert greedy == (best == [*end.encode()])
            # Rolling begins with an end token in front, which the first byte is rated by.
            logprobs_TV = llm.logits([257, *ids]).double().log_softmax(-1)
            assert _number(whole) == pytest.approx(sum(float(logprobs_TV[place, token]) for place, token in enumerate(ids)), abs=1e-3)
    assert "e" not in text


def _number(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def test_guidellm(running: Process, installed: Callable[[str], Path], spelled: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run([
        installed("guidellm").parent / "guidellm", "run", "--backend",
        f"kind=openai_http,target={running.url},model=default,request_format=/v1/chat/completions", "--tokenizer", f"kind=hf_auto,model={spelled}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--output", f"kind=json,path={report}",
    ], tmp_path, HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert (8, 0) == (len(requests["successful"]), len(requests["errored"]))
    assert {16} == {request["output_tokens"] for request in requests["successful"]}


def test_aiperf(running: Process, installed: Callable[[str], Path], spelled: Path, tmp_path: Path) -> None:
    said = run([
        installed("aiperf").parent / "aiperf", "profile", "--model", "default", "--url", running.url, "--endpoint-type", "chat", "--streaming",
        "--concurrency", "2", "--request-count", "8", "--tokenizer", str(spelled), "--synthetic-input-tokens-mean", "40",
        "--output-tokens-mean", "12", "--extra-inputs", "ignore_eos:true", "--ui", "none",
    ], tmp_path)
    found = [json.loads(file.read_text(encoding="utf-8")) for file in tmp_path.rglob("profile_export_aiperf.json")]
    assert found, said[-3000:]
    assert 8 == found[0]["request_count"]["avg"]
    assert not re.search(r'"error_request_count": \{[^}]*"avg": [1-9]', json.dumps(found[0]))
