"""The OpenAPI document against the engine: what fits it is answered as it says, and nothing makes a request fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.from_thread
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from infill_engine import models
from infill_engine.config import EngineConfig
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service import Service
from starlette.types import ASGIApp, Receive, Scope, Send

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LOCAL = {"host": "localhost"}
CHECKS: list[Callable[..., Any]] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    table = tmp_path_factory.mktemp("model") / "table.json"
    table.write_text(json.dumps({"": "x = 1\ny = 2\n"}))
    with anyio.from_thread.start_blocking_portal() as portal:
        built = Service(lambda report: models.load(EngineConfig(model=f"fake:{table}", threads=1), report))
        with portal.wrap_async_context_manager(built.running()) as running:
            portal.call(running.ready)
            yield running


def without_lifespan(app: ASGIApp) -> ASGIApp:
    """The fixture has it: every client that is made would begin and end it again."""

    async def requests(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})

    return requests


@pytest.fixture
def own(service: Service) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", without_lifespan(service.app))


@pytest.fixture
def tcp(service: Service) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", without_lifespan(service.tcp), headers=LOCAL)


few = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("face", ["own", "tcp"])
def test_the_engine_does_what_its_document_says(face: str, request: pytest.FixtureRequest) -> None:
    for operation in (found.ok() for found in request.getfixturevalue(face).get_all_operations()):
        if operation.path != "/v1/stop":  # It does.

            @few
            @given(operation.as_strategy())
            def conforms(case: Any) -> None:
                case.call_and_validate(checks=CHECKS, headers=LOCAL)

            conforms()


def test_a_document_names_what_every_client_needs(own: Any) -> None:
    document = own.raw_schema
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) >= {
        "/infill", "/v1/completions", "/v1/fim/completions", "/v1/models", "/health", "/props", "/metrics",
        "/v1/infill", "/v1/prime", "/v1/status", "/v1/stop", "/openapi.json",
    }  # fmt: skip
    assert document["components"]["schemas"]["InfillRequest"]["required"] == ["client", "document"]


def test_every_endpoint_is_in_the_handbook(own: Any) -> None:
    handbook = (Path(__file__).parents[2] / "docs/protocol.md").read_text(encoding="utf-8")
    assert [path for path in own.raw_schema["paths"] if path not in handbook] == []
