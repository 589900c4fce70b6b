package users

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
)

// FindCommand finds a program as a shell in the directory would that has this PATH. The error is
// errdefs.ErrInvalidArgument.
func FindCommand(command, dir, path string) (string, error) {
	switch {
	case command == "":
		return "", errdefs.ErrInvalidArgument.WithMessage("the command is empty")
	case filepath.IsAbs(command):
		return command, nil
	case strings.Contains(command, "/"):
		return filepath.Join(dir, command), nil
	}
	for _, d := range filepath.SplitList(path) {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		candidate := filepath.Join(d, command)
		if info, err := os.Stat(candidate); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return candidate, nil
		}
	}
	return "", errdefs.ErrInvalidArgument.WithMessage("there is no command " + command + " in PATH")
}
