"""The S3 server of these tests."""

from s3_server import bucket, moto_server, proxy, s3, shared_proxy

__all__ = ["bucket", "moto_server", "proxy", "s3", "shared_proxy"]
