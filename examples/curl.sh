#!/bin/sh
# The three ways in which clients and routers send a body, and a stream. BASE_URL says where the server is.
set -eu
cd "$(dirname "$0")"
BASE_URL="${BASE_URL:-http://127.0.0.1:8080/v1}"

echo "# Content-Length"
curl -sS --fail-with-body "$BASE_URL/chat/completions" -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}'
echo

echo "# a file, byte for byte"
curl -sS --fail-with-body "$BASE_URL/chat/completions" --data-binary @payload.json
echo

echo "# chunked, from a pipe, as one-api and new-api send it"
curl -sS --fail-with-body "$BASE_URL/chat/completions" -H 'Content-Type: application/json' \
  -H 'Transfer-Encoding: chunked' --data-binary @- < payload.json
echo

echo "# a stream"
curl -sS --fail-with-body --no-buffer "$BASE_URL/chat/completions" \
  -d '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "stream": true}'
