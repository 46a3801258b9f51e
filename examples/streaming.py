"""Stream a response. If a device disappears meanwhile, the response pauses, then resumes."""

import os
import sys

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("PRIMAD_URL", "http://127.0.0.1:8080/v1"), api_key="none")
question = sys.argv[1] if len(sys.argv) > 1 else "Tell me a story."

stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": question}],
    seed=7,
    max_completion_tokens=200,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} completion tokens)")
