"""One chat completion, with OpenAI's own client."""

import os
import sys

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("PRIMAD_URL", "http://127.0.0.1:8080/v1"), api_key="none")
question = sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"
model = client.models.list().data[0].id

completion = client.chat.completions.create(
    model=model,
    messages=[{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": question}],
    temperature=0,
    max_completion_tokens=100,
)
print(completion.choices[0].message.content)
