"""Many prompts, at most four at once. One failure does not affect the others, and is not counted as a bad answer."""

import asyncio
from typing import Any

from agent_rollouts.agentic_rollout_library import AgenticRollout, AgenticRolloutConfig, RolloutFailed

at_work = most_at_work = 0


async def llm_func(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """Answers with the square of the number in the prompt. For one prompt it fails, as an unavailable server would."""
    global at_work, most_at_work
    at_work += 1
    most_at_work = max(most_at_work, at_work)
    await asyncio.sleep(0.2)
    at_work -= 1
    number = int(messages[-1]["content"].split()[-1])
    if number == 5:
        raise ConnectionError("the server is down")
    return f"Final Answer: {number**2}"


async def main() -> None:
    config = AgenticRolloutConfig(concurrent_requests=4)
    rollout = AgenticRollout(config=config, llm_generate_func=llm_func)
    prompts = [{"content": f"Square of {number}"} for number in range(8)]
    batch = [
        rollout.agent.run_trajectory(prompt=prompt, llm_generate_func=llm_func, request_id=f"batch_{i}")
        for i, prompt in enumerate(prompts)
    ]
    for result in await asyncio.gather(*batch, return_exceptions=True):
        if isinstance(result, RolloutFailed):
            print(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            print(f"{result.request_id}: {result.get_final_response()}")
    print("at most", most_at_work, "at once")


asyncio.run(main())
