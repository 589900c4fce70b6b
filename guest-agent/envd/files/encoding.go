package files

import (
	"net/http"
	"strconv"
	"strings"
)

// encoding is how a file is sent.
type encoding int

const (
	identity encoding = iota
	compressed
	unacceptable
)

// negotiate decides how a file is sent. Compressing costs more than it saves on one machine, so a client has to prefer it:
// gzip is the only coding that it names, or the one that it weighs most. A part of a file, or an answer that depends on what
// the client has, is of the file as it is.
func negotiate(h http.Header) encoding {
	codings := weights(h.Values("Accept-Encoding"))
	gzip, named := codings["gzip"]
	if !named {
		gzip = codings["*"]
	}
	plain, plainNamed := codings["identity"]
	if !plainNamed {
		plain = 1
		if any, ok := codings["*"]; ok && any == 0 {
			plain = 0
		}
	}
	partial := false
	for _, name := range []string{"Range", "If-Range", "If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since"} {
		partial = partial || h.Get(name) != ""
	}
	switch {
	case plain == 0 && (gzip == 0 || partial):
		return unacceptable
	case plain == 0:
		return compressed
	case partial || !named || gzip == 0:
		return identity
	}
	for coding, weight := range codings {
		if coding != "gzip" && weight >= gzip {
			return identity
		}
	}
	return compressed
}

// weights takes the header apart; a weight is 0 to 1. What can't be read isn't there.
func weights(values []string) map[string]float64 {
	all := map[string]float64{}
	for item := range strings.SplitSeq(strings.Join(values, ","), ",") {
		coding, parameter, weighed := strings.Cut(item, ";")
		coding = strings.ToLower(strings.TrimSpace(coding))
		if coding == "" {
			continue
		}
		weight := 1.0
		if weighed {
			value, ok := strings.CutPrefix(strings.ReplaceAll(strings.ToLower(parameter), " ", ""), "q=")
			q, err := strconv.ParseFloat(value, 64)
			if !ok || err != nil || !(q >= 0 && q <= 1) {
				continue
			}
			weight = q
		}
		all[coding] = weight
	}
	return all
}
