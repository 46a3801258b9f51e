"""A LangChain prompt and model that use primad, streamed."""

import os
import sys

import httpx
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = os.environ.get("PRIMAD_URL", "http://127.0.0.1:8080/v1")
model = httpx.get(f"{url}/models").json()["data"][0]["id"]

prompt = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "Describe {thing}.")])
chat = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_completion_tokens=100)
chain = prompt | chat | StrOutputParser()
for piece in chain.stream({"thing": sys.argv[1] if len(sys.argv) > 1 else "a lighthouse"}):
    print(piece, end="", flush=True)
print()
