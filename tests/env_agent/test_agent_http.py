"""Requests out of bytes, however those are cut, and what is no request."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.env.agent.server.http import HttpRequest, HttpResponse, RefusedError, RequestReader

PLAIN = b"POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nX-Y:  z \r\n\r\nhello"
CHUNKED = (
    b"POST /v1/x HTTP/1.1\r\nTransfer-Encoding: Chunked\r\nConnection: close\r\n\r\n"
    b"3;ext=1\r\nhel\r\nA\r\nlo, \r\nyou!\r\n0\r\nTrailer: t\r\n\r\n"
)
BARE = b"\r\nGET /v1/models HTTP/1.0\r\n\r\n"


def fed(*parts: bytes) -> list[HttpRequest]:
    reader = RequestReader(dict)
    found = []
    for part in parts:
        reader.feed(part)
        while (request := reader.next()) is not None:
            found.append(request)
    return found


def test_a_request_is_read() -> None:
    (request,) = fed(PLAIN)
    assert (request.method, request.path, request.body) == ("POST", "/v1/x", b"hello")
    assert request.headers["x-y"] == "z"
    assert not request.last


def test_chunks_are_put_together_and_trailers_skipped() -> None:
    (request,) = fed(CHUNKED)
    assert request.body == b"hello, \r\nyou"[:3] + b"lo, \r\nyou!"
    assert request.last


def test_without_a_body_and_of_the_old_version() -> None:
    (request,) = fed(BARE)
    assert (request.method, request.body, request.last) == ("GET", b"", True)


@given(st.lists(st.sampled_from([PLAIN, CHUNKED, BARE]), max_size=4), st.data())
def test_it_does_not_matter_where_bytes_are_cut(requests: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert fed(*parts) == fed(whole)
    assert len(fed(whole)) == len(requests)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET /x HTTP/2.0\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nnocolon\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nfolded : x\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc", 400),
        (b"GET /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 1000, 400),
        (b"GET /x HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n", 413),
        (b"GET /x HTTP/1.1\r\nx: " + b"y" * (1 << 17), 431),
    ],
)
def test_what_is_no_request_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(RefusedError) as refused:
        fed(data)
    assert refused.value.status == status


def test_many_chunks_do_not_add_up_to_a_body_that_is_too_large() -> None:
    chunk = b"200000\r\n" + b"x" * 0x200000 + b"\r\n"
    with pytest.raises(RefusedError) as refused:
        fed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", *[chunk] * 4, b"1\r\nx\r\n")
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("part", "status"), [(b"a: b\r\n", 431), (b"a:" + b"b" * 5000 + b"\r\n", 431)]
)
def test_trailers_have_an_end(part: bytes, status: int) -> None:
    reader = RequestReader(dict)
    reader.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")

    def feed() -> None:
        for _ in range(1 << 17):
            reader.feed(part)
            assert reader.next() is None

    with pytest.raises(RefusedError) as refused:
        feed()
    assert refused.value.status == status


def test_chunks_of_one_byte_have_an_end() -> None:
    reader = RequestReader(dict)
    reader.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    reader.feed(b"1\r\nx\r\n" * (1 << 16))
    with pytest.raises(RefusedError, match="more than 32768 chunks"):
        reader.next()


def test_bytes_that_nobody_takes_are_bounded() -> None:
    reader = RequestReader(dict)
    reader.feed(b"x" * (16 << 20))
    with pytest.raises(RefusedError, match="more than 8 MiB"):
        reader.feed(b"x")


def test_a_client_may_wait_before_it_sends_the_body() -> None:
    reader = RequestReader(dict)
    reader.feed(b"POST /x HTTP/1.1\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
    assert reader.next() is None
    assert reader.waited_for
    reader.feed(b"ok")
    request = reader.next()
    assert request is not None
    assert request.body == b"ok"
    assert not reader.waited_for


def test_a_response_says_how_long_it_is() -> None:
    data = HttpResponse(body=b"{}").encoded(last=True)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 2" in head
    assert b"connection: close" in head
    assert body == b"{}"


def test_a_refusal_is_told_as_openai_tells_it() -> None:
    response = RefusedError(401, "no", "invalid_api_key").response()
    error = json.loads(response.body)["error"]
    assert response.status == 401
    assert error == {
        "message": "no",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
