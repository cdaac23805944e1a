// Translation in C++ by CTranslate2 and SentencePiece: an OPUS-MT model, imported, exported by `vaswani export`.
//
//     translate FOLDER source.spm target.spm [BEAMS] < source.en > translated.de
#include <ctranslate2/translator.h>
#include <sentencepiece_processor.h>

#include <iostream>
#include <string>
#include <vector>

int main(int count, char** arguments) {
    sentencepiece::SentencePieceProcessor source, target;
    source.LoadOrDie(arguments[2]);
    target.LoadOrDie(arguments[3]);
    ctranslate2::Translator translator(arguments[1], ctranslate2::Device::CPU);
    ctranslate2::TranslationOptions options;
    options.beam_size = count > 4 ? std::stoul(arguments[4]) : 4;
    options.max_decoding_length = 100;  // no more than the model has positions
    for (std::string line; std::getline(std::cin, line);) {
        std::vector<std::string> tokens = source.EncodeAsPieces(line);
        tokens.push_back("</s>");
        std::cout << target.DecodePieces(translator.translate_batch({tokens}, options)[0].output()) << std::endl;
    }
}
