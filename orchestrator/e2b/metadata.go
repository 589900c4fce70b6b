package e2b

import (
	"net/url"
	"strings"
)

// maxFilter is how many pairs a filter can have.
const maxFilter = 100

// parseMetadata reads a filter: pairs "key=value" joined by "&". SDKs encode keys and values, then the whole, and the query that
// it is in is encoded, too; that last one is undone already. What isn't encoded so often is taken as it is.
func parseMetadata(s string) (map[string]string, error) {
	if s == "" {
		return nil, nil
	}
	filter := map[string]string{}
	pairs := unescape(s)
	if n := strings.Count(pairs, "&") + 1; n > maxFilter {
		return nil, invalid("metadata: there are %d pairs, there can be %d", n, maxFilter)
	}
	for pair := range strings.SplitSeq(pairs, "&") {
		key, value, is := strings.Cut(pair, "=")
		if !is || key == "" {
			return nil, invalid("metadata: %s isn't key=value", quote(pair))
		}
		key = unescape(key)
		if _, twice := filter[key]; twice {
			return nil, invalid("metadata: %s is there more than once", quote(key))
		}
		filter[key] = unescape(value)
	}
	return filter, nil
}

func unescape(s string) string {
	if u, err := url.QueryUnescape(s); err == nil {
		return u
	}
	return s
}
