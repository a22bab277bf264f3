"""Only whoever was given the address may ask, and only for what is a run's."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.view.kit import make_run, served


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("guarded")
    run = make_run(folder / "one", [{"loss": 1.0}])
    (run / "video.mp4").write_bytes(bytes(range(256)) * 40)
    secret = folder / "secret.mp4"
    secret.write_bytes(b"of somebody else")
    (run / "linked.mp4").symlink_to(secret)
    with served(run) as printed:
        yield printed


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[httpx.Client]:
    """One that has the cookie."""
    with httpx.Client(base_url=origin_of(address), verify=False) as one:
        assert one.get(address).status_code == 200
        yield one


def get(url: str, headers: Mapping[bytes, bytes] | None = None) -> httpx.Response:
    """The answer to somebody who has no cookie."""
    return httpx.get(url, headers=headers, verify=False)


def origin_of(address: str) -> str:
    parts = urlsplit(address)
    return f"http://{parts.netloc}"


def raw(address: str, request: str) -> str:
    """What is answered to these lines."""
    port = urlsplit(address).port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request.replace("\n", "\r\n").encode())
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()


@pytest.mark.parametrize(
    "path", ["/", "/api/state", "/static/app.js", "/?token=wrong", "/x?token="]
)
def test_without_the_token_nothing_is_answered(address: str, path: str) -> None:
    answer = get(origin_of(address) + path)
    assert answer.status_code == 401
    assert "Open the address that rlinf-async view printed" in answer.text
    assert "set-cookie" not in answer.headers


def test_the_token_is_exchanged_for_a_cookie_of_this_port(address: str) -> None:
    answer = get(address)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"rlinf_async_view_{urlsplit(address).port}=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    token = urlsplit(address).query.partition("=")[2]
    assert token not in cookie
    assert token not in answer.text
    value = cookie.partition(";")[0]
    page = get(origin_of(address), {b"cookie": f"other=1; {value}".encode()})
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert get(origin_of(address), {b"cookie": f"{value}x".encode()}).status_code == 401
    assert get(origin_of(address), {b"cookie": b"a=\xe4"}).status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil:80"])
def test_another_host_is_refused_even_with_the_cookie(client: httpx.Client, host: str) -> None:
    answer = client.get("/api/state", headers={"host": host})
    assert answer.status_code == 403
    assert repr(host) in answer.text
    assert "runs" not in answer.text


def test_a_request_without_a_host_is_refused(address: str) -> None:
    query = urlsplit(address).query
    assert raw(address, f"GET /?{query} HTTP/1.0\n\n").startswith("HTTP/1.1 403")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_another_origin_is_refused_even_with_the_cookie(client: httpx.Client, origin: str) -> None:
    answer = client.get("/api/state", headers={"origin": origin})
    assert answer.status_code == 403
    assert f"the origin {origin!r}" in answer.text


def test_the_own_origin_is_answered(client: httpx.Client, address: str) -> None:
    answer = client.get("/api/state", headers={"origin": origin_of(address)})
    assert [run["name"] for run in answer.json()["runs"]] == ["one"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(client: httpx.Client, method: str) -> None:
    answer = client.request(method, "/api/state")
    assert answer.status_code == 405
    assert method in answer.text


def test_every_answer_forbids_what_is_not_its_own(client: httpx.Client) -> None:
    for answer in (client.get("/"), client.get("/api/nothing"), client.post("/")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/video/0/..%2fconfig.toml",
        "/video/0/config.toml",
        "/video/0/linked.mp4",
        "/video/0/%2fetc%2fpasswd",
        "/video/0/video.mp4%00",
        "/video/1/video.mp4",
        "/video/-1/video.mp4",
        "/video/%d9%a3/video.mp4",
    ],
)
def test_no_path_leads_out_of_the_run(client: httpx.Client, path: str) -> None:
    answer = client.get(httpx.URL(str(client.base_url)).copy_with(raw_path=path.encode()))
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_videos_are_served_in_ranges(client: httpx.Client) -> None:
    assert client.get("/api/videos", params={"run": 0}).json() == {"videos": ["video.mp4"]}
    part = client.get("/video/0/video.mp4", headers={"range": "bytes=256-511"})
    assert (part.status_code, part.content) == (206, bytes(range(256)))
    assert part.headers["content-range"] == "bytes 256-511/10240"
    beyond = client.get("/video/0/video.mp4", headers={"range": "bytes=20000-"})
    assert beyond.status_code == 416


@pytest.mark.parametrize("query", ["run=x", "run=9", "run=", "run=-1", "run=1e3", ""])
def test_a_run_that_is_not_there_is_named(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/api/metrics?{query}")
    assert answer.status_code == 404
    assert answer.json()["error"]


def test_another_start_has_another_token(address: str, tmp_path: Path) -> None:
    with served(make_run(tmp_path / "two")) as other:
        given = urlsplit(address).query
        assert get(f"{origin_of(other)}/?{given}").status_code == 401
