"""What the package's web servers share: the guard before their routes, and the server itself."""
