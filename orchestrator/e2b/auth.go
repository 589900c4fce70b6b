package e2b

import (
	"context"
	"net/http"
	"strings"

	"github.com/containerd/errdefs"
)

const (
	keyHeader  = "X-Api-Key"
	teamHeader = "X-Team-Id"
)

// Keys knows whose a key is: a db.DB. A key that isn't good is errdefs.ErrUnauthenticated.
type Keys interface {
	Authenticate(ctx context.Context, key string) (team, id string, err error)
}

const keyWanted = "send a header X-API-KEY: e2b_<40 hexadecimal digits>, or Authorization: Bearer with the same; `cube key create` makes a key"

// keyOf is the key that a request has.
func keyOf(h http.Header) (string, error) {
	key := h.Get(keyHeader)
	scheme, bearer, _ := strings.Cut(h.Get("Authorization"), " ")
	switch {
	case key != "":
		return key, nil
	case strings.EqualFold(scheme, "Bearer") && bearer != "":
		return strings.TrimSpace(bearer), nil
	}
	return "", fail(http.StatusUnauthorized, "there is no API key in the request: %s", keyWanted)
}

// unauthorized is why a key isn't taken.
func unauthorized(err error) error {
	if errdefs.IsUnauthorized(err) {
		return fail(http.StatusUnauthorized, "%s: %s", err.Error(), keyWanted)
	}
	return err
}
