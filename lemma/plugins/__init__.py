"""What most people never touch: components for other systems, services and file formats. Each is imported when somebody
names it, by the registry or a function of the package that it belongs to."""
