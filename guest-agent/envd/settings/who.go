package settings

import (
	"net/http"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// Caller is whom a request acts as: who its Basic authorization names, without a password, or the default user. The error is
// errdefs.ErrUnauthenticated.
func (s *Store) Caller(header http.Header) (users.User, error) {
	name := ""
	if header.Get("Authorization") != "" {
		var ok bool
		if name, _, ok = (&http.Request{Header: header}).BasicAuth(); !ok {
			return users.User{}, errdefs.ErrUnauthenticated.WithMessage("the request's Authorization isn't Basic with a user's name")
		}
	}
	return s.Named(name)
}

// Named is the user of the name, or the default user where it is empty. The error is errdefs.ErrUnauthenticated.
func (s *Store) Named(name string) (users.User, error) {
	if name == "" {
		name = s.Get().User
	}
	u, err := s.Users.Lookup(name)
	if errdefs.IsNotFound(err) {
		return u, errdefs.ErrUnauthenticated.WithMessage("there is no user " + strconv.Quote(name) + " in this sandbox")
	}
	return u, err
}
