"""The web server of the shop, on a port of the system's choice, which it prints."""

from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), WSGIRequestHandler) as server:
        server.set_app(StaticFilesHandler(get_wsgi_application()))
        print(f"port {server.server_port}", flush=True)
        server.serve_forever()
