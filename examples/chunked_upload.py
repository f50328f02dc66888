"""A chunked request body with nothing but the standard library. BASE_URL says where the server is."""

import http.client
import json
import os
from urllib.parse import urlsplit

url = urlsplit(os.environ.get("BASE_URL", "http://127.0.0.1:8080/v1"))
body = json.dumps({"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}).encode()

connection = http.client.HTTPConnection(url.hostname, url.port)
# An iterable body has no length that could be known beforehand: http.client sends it in chunks, here of 7 bytes.
pieces = (body[i : i + 7] for i in range(0, len(body), 7))
connection.request("POST", f"{url.path}/chat/completions", pieces, {"Content-Type": "application/json"})
response = connection.getresponse()
print(response.status, json.load(response)["choices"][0]["message"]["content"])
connection.close()
