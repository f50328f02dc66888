"""How the server is: health, figures, Prometheus, and the page that shows them."""
