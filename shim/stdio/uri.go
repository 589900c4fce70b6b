package stdio

import (
	"fmt"
	"net/url"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
)

// Schemes of stdio URIs.
const (
	schemeFifo     = "fifo"
	schemeFile     = "file"
	schemeBinary   = "binary"
	schemeBinaryV2 = "binary-v2"
)

// target is what a URI names.
type target struct {
	scheme string // "" for nothing
	path   string
	query  string // still encoded
}

func parse(uri string) (target, error) {
	if uri == "" {
		return target{}, nil
	}
	if !strings.Contains(uri, "://") {
		return target{scheme: schemeFifo, path: uri}, nil
	}
	u, err := url.Parse(uri)
	if err != nil {
		return target{}, invalid("%q is not a URI: %v", uri, err)
	}
	switch u.Scheme {
	case schemeFifo, schemeFile, schemeBinary, schemeBinaryV2:
	default:
		return target{}, invalid("%q: scheme %s is not supported; use a fifo, file://, binary:// or binary-v2://", uri, u.Scheme)
	}
	if !filepath.IsAbs(u.Path) {
		return target{}, invalid("%q names no absolute path", uri)
	}
	return target{scheme: u.Scheme, path: u.Path, query: u.RawQuery}, nil
}

func invalid(format string, args ...any) error {
	return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}
