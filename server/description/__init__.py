"""The server's description of itself: `/openapi.json`, and the page that shows it."""
