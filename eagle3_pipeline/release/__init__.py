"""From a measured draft to a folder that others serve and trust, and to where it is published."""
