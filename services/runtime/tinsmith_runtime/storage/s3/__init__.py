"""S3-compatible object stores through the minio client, which nothing else imports."""
