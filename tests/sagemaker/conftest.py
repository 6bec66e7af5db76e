"""The AWS server of these tests."""

from s3_server import moto_server, proxy, s3, shared_proxy

__all__ = ["moto_server", "proxy", "s3", "shared_proxy"]
