"""Pictures that clients send: found in messages, fetched where that is allowed, decoded in processes of their own."""
