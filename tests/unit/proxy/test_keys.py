"""Keys and paths: which requests are admitted, and to which session."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.proxy import keys
from agent_runtime.proxy.http import ApiCall, PlainPath, SessionPath, TurnPath, target_of

SESSIONS = st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True).filter(keys.is_session_id)


@given(SESSIONS)
def test_a_key_leads_to_its_session_and_matches_only_itself(session: str) -> None:
    key = keys.new_key(session)
    assert keys.session_of(key) == session
    assert keys.matches(key, keys.digest(key))
    assert not keys.matches(keys.new_key(session), keys.digest(key))
    assert key.split(".")[-1] not in keys.digest(key)


@given(st.text(max_size=200))
def test_text_other_than_a_sessions_key_is_no_key(text: str) -> None:
    assert keys.session_of(text) is None or keys.is_session_id(keys.session_of(text) or "")


def test_a_session_is_never_called_like_a_key_or_a_path() -> None:
    for name in ("sk-s.x", "", ".", "..", "a/b", "a b", "x" * 129, "é", "a\n"):
        assert not keys.is_session_id(name)


@given(SESSIONS)
def test_each_form_of_base_url_is_parsed_to_the_same_call(session: str) -> None:
    key = keys.new_key(session)
    for api in ("/chat/completions", "/completions", "/responses", "/messages", "/models"):
        assert target_of(f"/v1{api}") == ApiCall(api)
        assert target_of(f"/{key}/v1{api}") == ApiCall(api, key=key)
        assert target_of(f"/sessions/{session}/v1{api}") == ApiCall(api, session=session)
        if session not in ("v1", "sessions"):
            assert target_of(f"/{session}/v1{api}") == ApiCall(api, session=session)
    assert target_of(f"/v1/chat/completions/{session}") == ApiCall("/chat/completions", session=session)
    assert target_of(f"/sessions/{session}") == SessionPath(session, "")
    assert target_of(f"/sessions/{session}/complete") == SessionPath(session, "complete")
    assert target_of(f"/sessions/{session}/traces") == SessionPath(session, "traces")
    assert target_of(f"/sessions/{session}/turns/7") == TurnPath(session, 7)


def test_missing_session_is_distinguished() -> None:
    assert target_of("/health") == PlainPath("health")
    for path in ("", "/", "/v1", "/sessions", "/sessions/", "/sessions/s/turns/x", "/sessions/s/turns/²", "/s/v2/x"):
        assert target_of(path) is None
