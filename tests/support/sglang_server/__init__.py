"""A stand-in for SGLang (0.5.23): the routes that we use, over the engine of vLLM's stand-in (`vllm_server`).

`tests/integration/sglang` runs the same assertions on it and on SGLang itself. Surprising behaviour of both:

1. /update_weight_version aborts all requests unless `abort_all_requests` is false.

2. After a load the model's name in /v1/models is the folder of the weights. Requests may name any model.

3. /update_weights_from_disk flushes the cache. If requests are paused in place it then answers 400, with the new
weights loaded and the old name kept.

4. /ready answers 503 while the server is paused; no other route reports that.

5. Chat completions refuse `return_token_ids` in a stream. Complete answers have `response_token_ids`.

6. Without --incremental-streaming-output, each event of /generate repeats the answer so far.

7. An adapter that cannot be loaded is a 400, and so is a call that names one which never was loaded, as `lora_path`.

8. /generate refuses unknown sampling parameters, and ignores other unknown fields.
"""

from tests.support.sglang_server.server import SglangStandIn

__all__ = ["SglangStandIn"]
