from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.models.pool.server import Load, Pressure, parse_load

PAGE = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a {strange} name"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a {strange} name"} 4.0 1712345678
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total 50
vllm:iteration_tokens_total_count{engine="0"} 7
vllm:iteration_tokens_total_bucket{engine="0",le="1"} 5
python_gc_objects_collected_total{generation="0"} 1234.0
"""


def test_the_fullest_engine_of_a_server_and_all_its_waiting_requests_count() -> None:
    assert parse_load(PAGE) == Load(Pressure(0.75, 7.0), 157.0)


def test_a_server_that_lacks_a_metric_is_not_under_pressure() -> None:
    assert parse_load("vllm:num_requests_running 1\n") == Load(Pressure(0.0, 0.0), 0.0)


def test_page_other_than_vllms_metrics_gives_no_load() -> None:
    assert parse_load("<html>404</html>") is None


@given(st.text())
def test_any_metrics_text_is_parsed_without_an_error(text: str) -> None:
    parse_load(text)
    parse_load(f"vllm:kv_cache_usage_perc{{{text}")


def test_sglang_with_priorities_is_read_by_its_lines_for_all_of_them() -> None:
    page = "\n".join(
        f'sglang:{name}{{model_name="m",priority="{priority}",tp_rank="0"}} {value}'
        for name, value in (("num_queue_reqs", 7), ("token_usage", 0.75), ("realtime_tokens_total", 100))
        for priority in ("", "-3")
    )
    assert parse_load(page) == Load(Pressure(0.75, 7.0), 100.0)
