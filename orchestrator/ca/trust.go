package ca

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/containerd/errdefs"
)

// hostStore is where Debian's update-ca-certificates takes the administrator's certificates from.
const hostStore = "/usr/local/share/ca-certificates"

// Trust has this host's programs trust the authority, where they use the system's store, and returns the file by which they do.
func (a *Authority) Trust(ctx context.Context) (file string, err error) {
	update, err := exec.LookPath("update-ca-certificates")
	if err != nil {
		return "", errdefs.ErrNotImplemented.WithMessage("this host has no update-ca-certificates: add what `cube ca export` prints to its trust store by the means of its distribution")
	}
	file = filepath.Join(hostStore, "cube-"+a.domain+".crt")
	if err := os.MkdirAll(hostStore, 0o755); err != nil {
		return "", err
	}
	if err := keep(file, a.Root()); err != nil {
		return "", fmt.Errorf("install the certificate: %w", err)
	}
	if err := os.Chmod(file, 0o644); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, update).CombinedOutput(); err != nil {
		return "", errors.Join(fmt.Errorf("update-ca-certificates: %w: %s", err, out), os.Remove(file))
	}
	return file, nil
}
