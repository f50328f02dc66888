"""The bridge: the OpenAI dialect. A request comes in, deltas come out, objects go back."""
